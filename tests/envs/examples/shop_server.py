"""An MCP server: a shop with one basket, complete.

python shop_server.py, or python shop_server.py streamable-http 8000
"""

import sys

from mcp.server import mcpserver

PRICES = {"apple": 3, "bread": 5, "cheese": 9}
server = mcpserver.MCPServer("shop")
basket: list[str] = []


@server.tool()
def buy(item: str) -> str:
  """Puts an item into the basket."""
  if item not in PRICES:
    return f"there is no {item}; there are {', '.join(PRICES)}"
  basket.append(item)
  return f"{len(basket)} in the basket"


@server.tool()
def total() -> int:
  """Returns the price of all that is in the basket."""
  return sum(PRICES[item] for item in basket)


if __name__ == "__main__":
  match sys.argv[1:]:
    case ["streamable-http", port]:
      server.run("streamable-http", port=int(port))
    case _:
      server.run()
