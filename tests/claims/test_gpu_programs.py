"""Programs compile for a GPU that is not there, and say what memory they take.

XLA compiles for a described device, here an H200, with jax's plugin for CUDA:
`make gpu-programs`. What the programs compute, `test_on_a_gpu.py` tests on one.
"""

import dataclasses
import functools
import importlib.util
import re

import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies

from models import config as config_lib
from models import memory_report, sharding
from models import policy as policy_lib
from rl.algorithms import losses, objective
from rl.data import batch
from rl.engine.builtin import dispatch_shapes, model_runner
from rl.pools import placement
from rl.train import learner, optimizers
from tests.helpers import absent_devices, accelerator_models

pytestmark = [
  pytest.mark.compiled,
  pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs jax's plugin for CUDA: make gpu-programs",
  ),
]

H200 = """
  gpu_device_info {
    threads_per_block_limit: 1024 threads_per_warp: 32
    shared_memory_per_block: 49152 shared_memory_per_core: 233472
    shared_memory_per_block_optin: 232448
    threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
    block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
    block_dim_limit_z: 65535 memory_bandwidth: 4800000000000
    l2_cache_size: 62914560 clock_rate_ghz: 1.98
    device_memory_size: 150754820096
    cuda_compute_capability { major: 9 }
    registers_per_core_limit: 65536 registers_per_block_limit: 65536
  }
  platform_name: "CUDA"
  dnn_version_info { major: 9 minor: 10 }
  device_description_str: "NVIDIA H200"
"""
MODELS = accelerator_models.MODELS
QWEN = config_lib.qwen3("0.6b")


@pytest.fixture(scope="module")
def devices():
  """A device of the H200, of which jax asks the one that is here."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    patch.setattr(cudnn, "check_compute_capability", lambda _: True)
    yield described()


def described():
  topology = topologies.get_topology_desc(
    platform="cuda",
    topology_name="nvidia",
    topology="1x1x1",
    target_config=H200,
  )
  return topology.devices


def dispatch(config, devices, rows, length, chunk=1):
  """The compiled dispatch of so many rows, of one id or of chunks."""
  layout = placement.MeshSpec(rules=sharding.DECODE).layout(devices)
  config = dataclasses.replace(config, max_length=length)
  shapes = dispatch_shapes.DispatchShapes(
    slots=rows,
    row_buckets=(rows,),
    chunk_buckets=(chunk,),
    prefill_tokens=rows * chunk,
  )
  runner = model_runner.ModelRunner(config, shapes, layout, bias_slots=0)
  policy = policy_lib.of(config)
  params = memory_report.placed(policy.shapes, layout.tree(policy.axes))
  shape = rows, ((rows, chunk) if chunk > 1 else (0, 1))
  with absent_devices.described("gpu"):
    return runner.lower(params, shape).compile()


def lowered_step(config, devices, rows, length, **compute):
  compute = dataclasses.replace(config.compute, **compute)
  config = dataclasses.replace(config, compute=compute)
  programs = learner.Learner(
    config,
    placement.MeshSpec().layout(devices),
    objective.Objective(loss=losses.ClippedSurrogate()),
    optimizers.AdamW()(),
  )
  with absent_devices.described("gpu"):
    return programs.lower(batch.empty(rows, length))


@pytest.mark.parametrize(
  ("name", "chunk"),
  [("dense", 1), ("dense", 32), ("scanned", 1), ("experts", 32)],
)
def test_a_dispatch_compiles_with_its_kernels(devices, name, chunk):
  text = dispatch(MODELS[name], devices, 8, 256, chunk).as_text()
  assert "paged_attention" in text
  assert ("grouped_product" in text) == (name == "experts")


@pytest.mark.parametrize("name", ["scanned", "scanned experts"])
def test_weights_of_scanned_layers_are_read_where_they_lie(devices, name):
  text = dispatch(MODELS[name], devices, 8, 256).as_text()
  # A slice that is a result of its own is a copy.
  sizes = [
    np.prod([int(size) for size in shape.split(",")])
    for shape in re.findall(
      r"ROOT %\S+ = bf16\[([\d,]+)\]\S* (?:dynamic-slice|concatenate)\(", text
    )
  ]
  # Of the matrices those of keys and values are the smallest.
  config = MODELS[name]
  smallest = config.d_model * config.num_kv_heads * config.head_dim
  assert max(sizes, default=0) < smallest
  assert "dynamic-slice-fusion" in text


@pytest.mark.parametrize(
  ("name", "remat"),
  [("dense", "none"), ("scanned", "layer"), ("experts", "dots")],
)
def test_a_step_compiles_with_its_kernels(devices, name, remat):
  gradient, update = lowered_step(MODELS[name], devices, 4, 256, remat=remat)
  text = gradient.compile().as_text()
  assert "__cudnn$fmha" in text
  assert ("grouped_outer" in text) == (name == "experts")
  assert update.compile().memory_analysis().temp_size_in_bytes < 2**24


def test_packed_rows_go_to_cudnn_with_a_mask_or_without(devices):
  compiled = functools.partial(lowered_step, MODELS["dense"], devices, 4, 256)
  masked, either = (
    compiled(attention=form)[0].compile().as_text()
    for form in ("auto", "packed")
  )
  # Forward and backward of two layers: four under a mask. With runs as many
  # more, and the masked forward again, whose residuals are not kept.
  counts = [text.count("__cudnn$fmha") for text in (masked, either)]
  assert counts == [4, 10]


def test_32_rows_of_32k_fit_with_next_to_nothing_beside_them(devices):
  memory = dispatch(QWEN, devices, 32, 2**15).memory_analysis()
  # Keys and values take 120.3 GB, weights 1.2 GB.
  assert memory.argument_size_in_bytes < 122e9
  assert memory.temp_size_in_bytes < 0.5e9


@pytest.mark.parametrize(
  ("remat", "attention"),
  [("none", "auto"), ("none", "packed"), ("layer", "auto")],
)
def test_the_planned_memory_of_a_step_is_half_to_twice_of_what_xla_takes(
  devices, remat, attention
):
  rows, length = 4, 2048
  form = {"remat": remat, "attention": attention}
  gradient, _ = lowered_step(QWEN, devices, rows, length, **form)
  taken = gradient.compile().memory_analysis().temp_size_in_bytes
  compute = dataclasses.replace(QWEN.compute, **form)
  config = dataclasses.replace(QWEN, compute=compute)
  layout = placement.MeshSpec().plan
  planned = memory_report.activation_bytes(
    config, layout, rows=rows, length=length, platform="gpu"
  ) + memory_report.parameter_use_bytes(config, layout)
  assert 0.5 < planned / taken < 2, f"{planned / 1e9:.2f}, {taken / 1e9:.2f} GB"
