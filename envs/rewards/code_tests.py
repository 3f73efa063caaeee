"""Unit tests as text: refuses those that no answer could fail.

`UnitTests` runs the statements outside of functions, then the functions
`test...`. Another function or a class runs where one of these names it.
"""

import ast
import builtins
import functools
import symtable
from collections.abc import Iterable, Iterator, Sequence

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef
_IS_MAIN = {"__name__ == '__main__'", "'__main__' == __name__"}


@functools.lru_cache(maxsize=256)
def check(text: str) -> None:
  """Raises ValueError on tests that do not run, or not with the answer.

  Long tests take seconds, those that have passed no time again.
  """
  tree = ast.parse(text)
  if not _has_assert(ast.walk(tree)):
    raise ValueError(f"there is no assert in {text[:60]!r}")
  tests = [
    node
    for node in _outside_of_functions(tree)
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
  ]
  for test in tests:
    _check_parameters(test)
  running, idle = _running(tree, tests)
  for definition in idle:
    _check_idle(definition)
  if not _has_assert(running):
    never = [of.name for of in idle if _has_assert(ast.walk(of))]
    raise ValueError(
      "none of its asserts runs: "
      + "".join(f"`{name}` is never called, and " for name in never)
      + '`__name__` is "tests"; assert outside of functions, or in functions '
      "test_... without arguments, or call there what asserts"
    )
  names = _foreign_names(symtable.symtable(text, "tests", "exec"))
  if all(name.startswith("_") or hasattr(builtins, name) for name in names):
    raise ValueError(
      f"they name no function of the answer, but {sorted(names)}: what tests "
      "define or import, Python's own names, and names that begin with _, are "
      "never taken from it; call its function by name, without an import, or "
      "by another name"
    )


def _check_parameters(test: ast.FunctionDef) -> None:
  positional = [*test.args.posonlyargs, *test.args.args]
  named = zip(test.args.kwonlyargs, test.args.kw_defaults, strict=True)
  required = [
    *positional[: len(positional) - len(test.args.defaults)],
    *(parameter for parameter, default in named if default is None),
  ]
  if required and not _is_wrapped(test):
    names = ", ".join(f"`{parameter.arg}`" for parameter in required)
    raise ValueError(
      f"nothing gives `{test.name}` {names}: write it without arguments, with "
      "a loop over its cases, or give it a name that does not begin with test"
    )


def _check_idle(definition: _Definition) -> None:
  """Raises ValueError on tests as another runner would take them."""
  name = definition.name
  if isinstance(definition, ast.ClassDef):
    methods = [of.name for of in definition.body if isinstance(of, _Function)]
    if any(method.startswith("test") for method in methods):
      raise ValueError(
        f"the methods of `{name}` are never called: write them as functions "
        "test_... without arguments"
      )
  elif name.startswith("test"):
    raise ValueError(
      f"nothing awaits `{name}`: write `def {name}()`, with asyncio.run in it"
    )


def _running(
  tree: ast.Module, tests: Iterable[ast.FunctionDef]
) -> tuple[Sequence[ast.AST], Sequence[_Definition]]:
  """Returns the nodes that run, and the definitions that none of them names."""
  running: list[ast.AST] = []
  idle: list[_Definition] = []
  names = {test.name for test in tests}
  todo: list[ast.AST] = [tree]
  while todo:
    node = todo.pop()
    running.append(node)
    match node:
      case ast.Name(id=name) | ast.Attribute(attr=name):
        names.add(name)
    for part in _parts(node):
      if isinstance(part, _Definition) and not _runs_unnamed(part):
        idle.append(part)
      else:
        todo.append(part)
    if not todo:
      todo += [of for of in idle if of.name in names]
      idle = [of for of in idle if of.name not in names]
  return running, idle


def _foreign_names(module: symtable.SymbolTable) -> set[str]:
  """Returns the names that the text uses and does not define itself."""
  used: set[str] = set()
  todo = [module]
  while todo:
    table = todo.pop()
    todo += table.get_children()
    used |= {
      of.get_name()
      for of in table.get_symbols()
      if of.is_referenced() and of.is_global()
    }
  for of in module.get_symbols():
    if of.is_assigned() or of.is_imported():
      used.discard(of.get_name())
  return used


def _parts(node: ast.AST) -> Iterable[ast.AST]:
  if isinstance(node, ast.If) and ast.unparse(node.test) in _IS_MAIN:
    return node.orelse
  return ast.iter_child_nodes(node)


def _runs_unnamed(definition: _Definition) -> bool:
  return definition.name.startswith("__") or _is_wrapped(definition)


def _is_wrapped(definition: _Definition) -> bool:
  """Returns whether a decorator may call it; those of pytest only mark it."""
  decorators = map(ast.unparse, definition.decorator_list)
  return not all("pytest" in decorator for decorator in decorators)


def _outside_of_functions(tree: ast.Module) -> Iterator[ast.AST]:
  """Yields the nodes of the module, without those within definitions."""
  todo: list[ast.AST] = [tree]
  while todo:
    node = todo.pop()
    yield node
    if not isinstance(node, _Definition | ast.expr):
      todo += _parts(node)


def _has_assert(nodes: Iterable[ast.AST]) -> bool:
  return any(map(_is_assert, nodes))


def _is_assert(node: ast.AST) -> bool:
  match node:
    case ast.Assert() | ast.Raise():
      return True
    # np.testing.assert_allclose, self.assertEqual, pytest.raises
    case ast.Name(id=name) | ast.Attribute(attr=name):
      return name.startswith("assert") or name == "raises"
  return False
