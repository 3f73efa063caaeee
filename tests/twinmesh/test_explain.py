"""`twinmesh explain` prints a cause, or the list of all."""

import pytest

from twinmesh import explain
from twinmesh.error_causes import CAUSES


def said(monkeypatch, capsys, *arguments):
  monkeypatch.setattr("sys.argv", ["explain", *arguments])
  explain.main()
  return capsys.readouterr().out


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.code)
def test_an_explanation_fits_a_terminal_and_is_whole(cause):
  lines = explain.text(cause).splitlines()
  assert lines[0] == f"{cause.code}: {cause.title}"
  assert max(map(len, lines)) <= 80
  assert len(lines) <= 40
  words = " ".join(explain.text(cause).split())
  assert " ".join(cause.why.split()) in words
  assert " ".join(cause.code_block.split()) in words


def test_a_link_of_the_page_is_a_path():
  causes = {cause.code: cause for cause in CAUSES}
  assert "[recipes](recipes.md)" in causes["TM-F01"].cure
  assert "docs/recipes.md" in explain.text(causes["TM-F01"])


@pytest.mark.parametrize("name", ["TM-H05", "tm-h05", "draining"])
def test_a_code_is_found_in_any_case_and_by_that_of_a_reply(
  monkeypatch, capsys, name
):
  assert said(monkeypatch, capsys, name).startswith("TM-H05: A server has no")


def test_without_a_code_all_are_listed(monkeypatch, capsys):
  lines = said(monkeypatch, capsys).splitlines()
  assert lines == [f"{cause.code}  {cause.title}" for cause in CAUSES]
  assert max(map(len, lines)) <= 80


def test_an_unknown_code_gets_a_way_out(monkeypatch, capsys):
  with pytest.raises(SystemExit) as end:
    said(monkeypatch, capsys, "TM-Z05")
  assert end.value.code == 2
  assert "there is no code TM-Z05; did you mean TM-" in capsys.readouterr().err
