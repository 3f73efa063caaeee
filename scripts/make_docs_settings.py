"""Writes docs/settings.md: the settings of a run, from types and docstrings."""

from collections.abc import Iterator

from configs import guess_number_moe
from launch.cli import settings_help

_INTRODUCTION = """# Settings

All settings of `configs/guess_number_moe.py`, which trains a mixture of experts
on a game. `--config.PATH=VALUE` changes one. A part such as `algorithm.loss`
can be replaced by any class of its type, which has its own settings. To list
the settings of any config, and what may replace each part:

```sh
python -m launch.train --config=configs/guess_number_moe.py --config.help
python -m launch.train --config=configs/guess_number_moe.py \\
    --config.help=algorithm
```

`--print_config` prints only the values, as JSON for `--config=FILE.json`.

<!-- Written by python -m scripts.make_docs from the docstrings. -->
"""


def page() -> str:
  """Returns the text of docs/settings.md."""
  entries = [*settings_help.entries(guess_number_moe.get_config())]
  parts = [one for one in entries if "." not in one.path]
  alone = [one for one in parts if not _below(one, entries)]
  lines = [_INTRODUCTION, "## The run itself", "", *_table(alone)]
  for part in parts:
    if below := _below(part, entries):
      lines += ["", f"## {part.path}", "", *_table([part, *below])]
  return "\n".join(lines) + "\n"


def _below(
  part: settings_help.SettingEntry, entries: list[settings_help.SettingEntry]
) -> list[settings_help.SettingEntry]:
  return [one for one in entries if one.path.startswith(f"{part.path}.")]


def _table(entries: list[settings_help.SettingEntry]) -> Iterator[str]:
  yield "| setting | type or choices | value | meaning |"
  yield "|---|---|---|---|"
  for one in entries:
    # Code of its own for each choice: in one, the site would show a backslash
    # before the bars between them, and break no line.
    kinds = ", ".join(f"`{k}`" for k in dict.fromkeys(one.kind.split(" | ")))
    yield f"| `{one.path}` | {kinds} | `{one.value}` | {_cell(one.meaning)} |"


def _cell(text: str) -> str:
  return text.replace("|", "\\|").replace("<", "&lt;") or " "
