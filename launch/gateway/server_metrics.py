"""Counters of a server in the text format of Prometheus."""

import collections
from collections.abc import Iterator, Mapping

from launch.http import admission
from rl.agents import sessions as sessions_lib
from rl.engine import contract

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATHS = (
  *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize"),
  *("/detokenize", "/finish", "/metrics", "/health", "/ready"),
)
_Samples = Mapping[str, float]


class ServerMetrics:
  """Counts finished requests; all methods belong to one event loop."""

  def __init__(self):
    self._count: collections.Counter[tuple[str, int]] = collections.Counter()
    self._seconds: dict[str, float] = collections.defaultdict(float)

  def ended(self, path: str, status: int, seconds: float) -> None:
    """Notes the end of a request, of which 0 had no reply."""
    # Names are few, whatever clients ask for.
    name = next((known for known in _PATHS if path.endswith(known)), "other")
    self._count[name, status] += 1
    self._seconds[name] += seconds

  def text(
    self,
    admitted: admission.Admission,
    sessions: sessions_lib.Sessions,
    engine: contract.EngineStats,
  ) -> str:
    """Returns all counters."""
    lines: list[str] = []
    for name, kind, samples in self._families(admitted, sessions, engine):
      lines.append(f"# TYPE twinmesh_{name} {kind}")
      lines += [
        f"twinmesh_{name}{labels} {value:.17g}"
        for labels, value in samples.items()
      ]
    return "\n".join([*lines, ""])

  def _families(
    self,
    admitted: admission.Admission,
    sessions: sessions_lib.Sessions,
    engine: contract.EngineStats,
  ) -> Iterator[tuple[str, str, _Samples]]:
    yield (
      *("requests_total", "counter"),
      {
        f'{{path="{path}",status="{status}"}}': number
        for (path, status), number in self._count.items()
      },
    )
    seconds = {f'{{path="{p}"}}': spent for p, spent in self._seconds.items()}
    yield "request_seconds_total", "counter", seconds
    ended = {f'{{why="{w}"}}': n for w, n in sessions.num_ended.items()}
    yield "sessions_ended_total", "counter", ended
    for name, kind, value in (
      ("answers_running", "gauge", admitted.running),
      ("draining", "gauge", admitted.draining),
      ("sessions_open", "gauge", len(sessions)),
      ("session_bytes", "gauge", sessions.num_bytes),
      ("engine_version", "gauge", engine.version),
      ("engine_running", "gauge", engine.running),
      ("engine_waiting", "gauge", engine.waiting),
      ("engine_pages", "gauge", engine.pages),
      ("engine_free_pages", "gauge", engine.free_pages),
      ("sampled_tokens_total", "counter", engine.sampled_tokens),
      ("prefilled_tokens_total", "counter", engine.prefilled_tokens),
      ("cached_tokens_total", "counter", engine.cached_tokens),
      ("drafted_tokens_total", "counter", engine.drafted_tokens),
      ("right_drafts_total", "counter", engine.right_drafts),
      ("preemptions_total", "counter", engine.preemptions),
    ):
      yield name, kind, {"": value}
