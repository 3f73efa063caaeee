"""Hook of mkdocs: links and long names of a clone, as the site has them.

Pages link to files outside of docs/, which are there where Markdown is read in
a clone. The site has pages for the notebooks; of other files it has no copy,
so that only their names are left. Long names in tables may break, or the last
column would be out of sight.
"""

import re

from mkdocs.config import defaults
from mkdocs.structure import files as files_lib
from mkdocs.structure import pages

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)]*)\)")
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_LONG = re.compile(r"<code>[^<]{25,}</code>")


def on_page_markdown(
  markdown: str,
  page: pages.Page,
  config: defaults.MkDocsConfig,
  files: files_lib.Files,
) -> str:
  """Returns a page whose links stay within the site."""
  return within_site(markdown, page.file.src_uri.count("/"))


def within_site(markdown: str, depth: int) -> str:
  """Rewrites links that leave docs/, on a page `depth` folders below it."""

  def link(match: re.Match[str]) -> str:
    text, up, path = match.groups()
    if up.count("/") <= depth:
      return match[0]
    if path.startswith("notebooks/"):
      return f"[{text}]({'../' * depth}{path.replace('.ipynb', '.md')})"
    return text

  return _LINK.sub(link, markdown)


def on_page_content(
  html: str,
  page: pages.Page,
  config: defaults.MkDocsConfig,
  files: files_lib.Files,
) -> str:
  """Returns a page whose tables have long names that may break."""
  return breakable(html)


def breakable(html: str) -> str:
  """Lets long code in tables break behind its dots, underscores and equals."""

  def cell(match: re.Match[str]) -> str:
    return _LONG.sub(lambda m: re.sub(r"(?<=[._=])", "<wbr>", m[0]), match[0])

  return _CELL.sub(cell, html)
