"""Hook of mkdocs: links of a clone, as the site has them.

Pages link to files outside of docs/, which are there where Markdown is read in
a clone. The site has pages for the notebooks; of other files it has no copy,
so that only their names are left.
"""

import re

from mkdocs.config import defaults
from mkdocs.structure import files as files_lib
from mkdocs.structure import pages

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)]*)\)")


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
