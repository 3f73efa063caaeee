"""The planned memory of an engine against what XLA takes for its dispatches."""

import dataclasses

import pytest

from models import config as model_config
from models import memory_report, sharding
from models import policy as policy_lib
from rl.engine.builtin import model_runner, sizing
from rl.engine.builtin import settings as engine_settings

CONFIG = model_config.tiny(d_model=16, num_heads=2, head_dim=8, d_ff=16)
SETTINGS = engine_settings.EngineSettings(
  slots=32,
  row_buckets=(32,),
  chunk_buckets=(4,),
  prefill_tokens=16,
  bias_slots=3,
  speculative_tokens=4,
  speculative_rows=32,
)


def taken(config, settings, layout):
  """Returns what XLA takes beside weights and pages, and what is planned."""
  sizes = settings.sizes(config, [sizing.Room(layout)])
  extras = settings.extras
  runner = model_runner.ModelRunner(config, sizes, layout, **extras._asdict())
  policy = policy_lib.of(config)
  params = memory_report.placed(policy.shapes, layout.tree(policy.axes))
  cache, *rest = sizing.lines(sizes, config, layout, extras).values()
  analyses = [
    runner.lower(params, shape).compile().memory_analysis()
    for shape in runner.shapes
  ]
  found = max(
    one.temp_size_in_bytes + one.argument_size_in_bytes for one in analyses
  )
  return found - memory_report.device_bytes(params) - cache, sum(rest)


@pytest.mark.compiled
@pytest.mark.parametrize(
  # Logits are most of it, or the ids of conversations.
  ("vocab_size", "max_length"),
  [(4096, 64), (64, 2**15)],
)
def test_drafts_are_planned_within_a_factor_of_two(vocab_size, max_length):
  config = dataclasses.replace(
    CONFIG, vocab_size=vocab_size, max_length=max_length
  )
  layout = sharding.Layout(sharding.make_mesh(), sharding.DECODE)
  found, planned = taken(config, SETTINGS, layout)
  assert found / 2 < planned < 2 * found


def test_slots_fit_also_where_only_some_have_drafts():
  # A slot takes 16 x 4096 bytes of logits. Up to 8 have those of 4 drafts more,
  # so from 40 slots on drafts take no room of their own, but for the ids.
  layout = sharding.Layout(sharding.make_mesh(), sharding.DECODE)
  config = dataclasses.replace(CONFIG, vocab_size=4096, max_length=64)
  settings = dataclasses.replace(
    SETTINGS, slots=None, row_buckets=(8, 32), speculative_rows=8
  )

  def held(sizes):
    return sum(sizing.lines(sizes, config, layout, settings.extras).values())

  for asked in (20, 100):
    sizes = dataclasses.replace(SETTINGS, slots=asked).sizes(
      config, [sizing.Room(layout)]
    )
    fitted = settings.sizes(config, [sizing.Room(layout, held(sizes))])
    assert (fitted.slots, fitted.pages) == (asked, sizes.pages)
    less = settings.sizes(config, [sizing.Room(layout, held(sizes) - 1)])
    assert less.slots < asked
