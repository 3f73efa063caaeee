"""An HTTP server that answers as it is told, byte by byte."""

import asyncio
import contextlib


def reply(body, status="200 OK", length=None):
  """Returns the bytes of an answer, whose announced length may be a lie."""
  length = len(body) if length is None else length
  head = f"HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n"
  return head.encode() + body


@contextlib.asynccontextmanager
async def serve(answer):
  """Yields the address of a server on the running loop.

  Args:
    answer: path, body, lines of the head -> bytes, after which the connection
      is closed; None hangs.
  """

  async def handle(reader, writer):
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
      head = (await reader.readuntil(b"\r\n\r\n")).lower().splitlines()
      sizes = [
        int(line.split(b":")[1])
        for line in head
        if line.startswith(b"content-length")
      ]
      body = await reader.readexactly(sum(sizes))
      said = answer(head[0].split()[1].decode(), body, head)
      if said is None:
        await reader.read()  # Until the client has gone.
      else:
        writer.write(said)
        await writer.drain()
    writer.close()

  server = await asyncio.start_server(handle, "127.0.0.1", 0)
  try:
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
  finally:
    server.close()
