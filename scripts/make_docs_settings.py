"""Writes docs/settings.md: the settings of a run, from types and docstrings."""

from collections.abc import Iterator

from configs import guess_number_moe
from launch.cli import settings_help

_INTRODUCTION = """# Settings

All settings of `configs/guess_number_moe.py`, which trains a mixture of experts
on a game. `--config.PATH=VALUE` changes one; any class of its type can replace
a part, such as `algorithm.loss`, and has settings of its own. To list the
settings of any config, with everything that may replace a part:

```sh
python -m launch.train --config=configs/guess_number_moe.py --config.help
python -m launch.train --config=configs/guess_number_moe.py \\
    --config.help=algorithm
```

`--print_config` prints the values alone, as JSON that `--config=FILE.json`
takes.

<!-- Written by python -m scripts.make_docs from the docstrings. -->
"""


def page() -> str:
  """Returns the text of docs/settings.md."""
  entries = [*settings_help.entries(guess_number_moe.get_config())]
  parts = [one for one in entries if "." not in one.path]
  alone = [one for one in parts if not _below(one, entries)]
  lines = [_INTRODUCTION, "## Of the run itself", "", *_table(alone)]
  for part in parts:
    if below := _below(part, entries):
      lines += ["", f"## {part.path}", "", *_table([part, *below])]
  return "\n".join(lines) + "\n"


def _below(
  part: settings_help.SettingEntry, entries: list[settings_help.SettingEntry]
) -> list[settings_help.SettingEntry]:
  return [one for one in entries if one.path.startswith(f"{part.path}.")]


def _table(entries: list[settings_help.SettingEntry]) -> Iterator[str]:
  yield "| setting | type | value | meaning |"
  yield "|---|---|---|---|"
  for one in entries:
    kind, value = f"`{_cell(one.kind)}`", f"`{_cell(one.value)}`"
    yield f"| `{one.path}` | {kind} | {value} | {_cell(one.meaning)} |"


def _cell(text: str) -> str:
  return text.replace("|", "\\|").replace("<", "&lt;") or " "
