"""Pictures: their scales, and their colours in light and dark browsers."""

import pathlib

import pytest

from launch.report import svg

DOCS = pathlib.Path(__file__).parents[3] / "docs"
PICTURES = sorted(DOCS.glob("*.svg"))
# Contrast of texts and lines with what is painted below them, as in WCAG 2.2:
# (L1 + 0.05) / (L2 + 0.05) of relative luminances. Lines of the grid, and what
# is meant to be pale, are left out.
FAINT = """
(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (colour) => colour.map((x) => x / 255)
    .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05)
    / (Math.min(light(a), light(b)) + 0.05);
  const inside = (box, x, y) => box.left <= x && x <= box.right
    && box.top <= y && y <= box.bottom;
  const faint = [];
  let seen = 0;
  for (const picture of document.querySelectorAll("svg")) {
    const boxes = [...picture.querySelectorAll("rect")]
      .map((rect) => [rect.getBoundingClientRect(), getComputedStyle(rect)]);
    const grid = boxes[0][1].stroke;
    const below = (element) => {
      const { x, y, width, height } = element.getBoundingClientRect();
      return boxes.filter(([box]) => inside(box, x + width / 2, y + height / 2))
        .map(([, style]) => [rgb(style.fill), Number(style.fillOpacity)])
        .reduce((under, [fill, share]) =>
          under.map((c, i) => c + (fill[i] - c) * share), [0, 0, 0]);
    };
    for (const element of picture.querySelectorAll(
      "text, line, polyline, path, circle")) {
      const style = getComputedStyle(element);
      const isText = element.tagName === "text";
      const kind = isText || element.tagName === "circle" ? "fill" : "stroke";
      if (style[kind] === grid || style.opacity !== "1") continue;
      seen += 1;
      const found = contrast(rgb(style[kind]), below(element));
      if (found < (isText ? 4.5 : 3)) {
        faint.push([element.outerHTML.slice(0, 90), found]);
      }
    }
  }
  return { faint, seen };
})()
"""


def test_smoothing_is_a_mean_over_a_twenty_fifth_of_the_run_each_way():
  # Three values: one neighbour each way. (1+2)/2, (1+2+6)/3, (2+6)/2.
  assert svg.smooth([1.0, 2.0, 6.0]) == [1.5, 3.0, 4.0]


def test_a_curve_of_any_length_has_the_ends_and_extremes_of_each_pixel():
  # Pixel 3 goes from 5 up to 9, down to 1 and to 4; the 6 and 7 on the way are
  # hidden by the line from 9 to 1. Pixel 4 has one place.
  places = [(3, 5), (3.2, 9), (3.4, 7), (3.5, 6), (3.6, 1), (3.9, 4), (4, 2)]
  drawn = svg.curve(places, svg.BLUE, "")
  assert 'points="3.0,5.0 3.2,9.0 3.6,1.0 3.9,4.0 4.0,2.0"' in drawn
  long = svg.curve([(i / 1000, i % 7) for i in range(50_000)], svg.BLUE, "")
  assert long.count(",") <= 4 * 50


def test_ticks_are_round_numbers_within_the_range():
  # 50 / 7 = 7.1, so the step is 10, from 10 (5 is below) to 50.
  assert svg.ticks(5, 55) == [10, 20, 30, 40, 50]
  assert svg.ticks(0, 0.35) == [
    0,
    0.05,
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.35,
  ]
  assert svg.ticks(1, 3, least=1) == [1, 2, 3]


def test_a_picture_has_a_dark_colour_for_each_colour_in_it():
  parts = [svg.line(0, 0, 9, 9, svg.OLIVE), svg.text(1, 2, "a < b")]
  drawn = svg.picture(90, 60, "a line", parts)
  assert f'[stroke="{svg.OLIVE}"] {{ stroke: #a9cf6a; }}' in drawn
  assert svg.BLUE not in drawn


@pytest.mark.process
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_pictures_of_the_docs_can_be_read(tmp_path, browser, is_dark):
  page = tmp_path / "page.html"
  drawn = "".join(path.read_text("utf-8") for path in PICTURES)
  page.write_text(f'<meta charset="utf-8"><body data-ready="true">{drawn}')
  browser.open(f"file://{page}")
  browser.look(dark=is_dark)
  found = browser.do(FAINT)
  assert found["faint"] == []
  # Hundreds of points, labels and lines in four pictures.
  assert len(PICTURES) == 4
  assert found["seen"] > 500


@pytest.mark.process
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_a_picture_is_as_dark_as_the_page_that_shows_it(
  tmp_path, browser, is_dark
):
  # The docs and GitHub have switches of their own, which set color-scheme.
  page, scheme = tmp_path / "page.html", "dark" if is_dark else "light"
  page.write_text(
    f'<html style="color-scheme: {scheme}"><body data-ready="true" '
    f'style="margin: 0"><img src="file://{PICTURES[0]}">'
  )
  browser.open(f"file://{page}")
  browser.look(dark=not is_dark)
  red, green, blue = browser.pixel(100, 10)
  # #1b1e25 or #fffefb: `--card` of style.css.
  assert (red, green, blue) == ((27, 30, 37) if is_dark else (255, 254, 251))
