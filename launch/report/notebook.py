"""Pictures and pages inside a notebook.

notebook.use_style()                        of matplotlib, for light and dark
notebook.timelines({"sync": spans, ...})    the timeline of the report's page
"""

import html
from collections.abc import Mapping, Sequence

from launch.report import frozen, page
from rl.runtime import trace

COLOURS = ("#6a7be0", "#1f9c8f", "#c9822b", "#c2588f", "#7a9b35", "#9a72d0")
"""Colours of lines and bars, readable on white and on black."""

_GREY = "#808080"
_AROUND, _TRACK = 270, 40  # Pixels: of all but the tracks, and of a track.


class Html:
  """HTML that Jupyter shows where it is the value of a cell."""

  def __init__(self, text: str):
    self.text = text

  def _repr_html_(self) -> str:
    return self.text

  def __repr__(self) -> str:
    return "a page"


def use_style() -> None:
  """Gives the figures that follow no background, and colours in between."""
  import matplotlib

  inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color")
  matplotlib.rcParams.update(
    {
      **dict.fromkeys((*inks, "ytick.color"), _GREY),
      **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
      **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
      "axes.prop_cycle": f"cycler('color', {[*COLOURS]})",
      "figure.constrained_layout.use": True,
      "figure.dpi": 96,
      "legend.frameon": False,
      "savefig.transparent": True,
    }
  )


def timelines(runs: Mapping[str, Sequence[trace.Span]]) -> Html:
  """Returns the timelines of runs, of which the reader chooses one.

  They need no kernel and no network. A viewer that runs no scripts, and a
  notebook that is not trusted, shows nothing in their place.

  Args:
    runs: spans by the name of a run.
  """
  end_s = max(span.end for spans in runs.values() for span in spans)
  whole = {"window": [0.0, end_s]}
  data = {
    name: {"timeline": page.timeline(spans, len(spans)) | whole, "bubbles": {}}
    for name, spans in runs.items()
  }
  tracks = max(len({span.track for span in spans}) for spans in runs.values())
  height = _AROUND + _TRACK * tracks
  text = frozen.page("Timelines", data, "timelines.js")
  return Html(
    f'<iframe title="Timelines" sandbox="allow-scripts" width="100%" '
    f'height="{height}" style="border: 0" srcdoc="{html.escape(text)}">'
    "</iframe>"
  )
