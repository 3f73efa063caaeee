"""Counters as Prometheus reads them."""

import dataclasses

from launch.gateway import server_metrics
from launch.http import admission
from models.chat import word_chat
from rl.agents import sessions
from rl.testing import scripted_engine


def test_counters_are_text_of_prometheus():
  counted = server_metrics.ServerMetrics()
  counted.ended("/sessions/a/v1/completions", 200, 0.5)
  counted.ended("/v1/completions", 200, 0.25)
  counted.ended('/any/"\n', 404, 1.0)
  some = sessions.Sessions(word_chat.WordChat(("go",)), max_sessions=1)
  some.open("a")
  some.open("b")
  engine = scripted_engine.ScriptedEngine(lambda request: []).stats()
  engine = dataclasses.replace(
    engine, version=3, drafted_tokens=9, right_drafts=5, preemptions=2
  )
  admitted = admission.Admission()
  with admitted.answering("", 2):
    lines = counted.text(admitted, some, engine).splitlines()
  for line in (
    "# TYPE twinmesh_requests_total counter",
    'twinmesh_requests_total{path="/v1/completions",status="200"} 2',
    'twinmesh_requests_total{path="other",status="404"} 1',
    'twinmesh_request_seconds_total{path="/v1/completions"} 0.75',
    'twinmesh_sessions_ended_total{why="ended to make room"} 1',
    "twinmesh_answers_running 2",
    "twinmesh_sessions_open 1",
    "twinmesh_engine_version 3",
    "twinmesh_drafted_tokens_total 9",
    "twinmesh_right_drafts_total 5",
    "twinmesh_preemptions_total 2",
  ):
    assert line in lines
  assert all(
    line.startswith(("# TYPE twinmesh_", "twinmesh_")) for line in lines
  )
