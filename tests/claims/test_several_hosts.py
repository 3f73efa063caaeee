"""Two processes that share a mesh, each as a host of its own."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

from models import config as config_lib
from models import policy as policy_lib
from models.hf import export
from tests.helpers import machine_speed

pytestmark = pytest.mark.process

_HOST = """
import sys
import jax
import numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
process, address, source, target = sys.argv[1:]
jax.distributed.initialize(address, 2, int(process))
from models import sharding
from models.hf import config as hf_config, export, load, safetensors_io
config = hf_config.load(source)
layout = sharding.Layout(sharding.make_mesh(2, 2))
with safetensors_io.TensorFiles(source) as files:
  params = load.place(files, config, layout)
export.export(target, params, config)
print(files.bytes_read)
"""


@pytest.mark.slow
def test_each_of_two_hosts_reads_its_part_and_the_first_one_exports(tmp_path):
  config = config_lib.tiny_moe(
    vocab_size=16, num_layers=2, d_model=8, head_dim=4, dense_layers=(0,)
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: jax.numpy.asarray(rng.normal(size=x.shape), x.dtype),
    jax.eval_shape(lambda: policy_lib.of(config).init(jax.random.key(0))),
  )
  several = tmp_path / "several"
  export.export(several, params, config, max_file_bytes=20_000)
  # Parameters are split over data = 2 hosts; expert = 2 within each.
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  hosts = [
    subprocess.Popen(
      [
        *(sys.executable, "-c", _HOST, str(process), address),
        *(str(several), str(tmp_path / "again")),
      ],
      cwd=pathlib.Path(__file__).parents[3],
      env={
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for process in range(2)
  ]
  try:
    ends = [
      host.communicate(timeout=machine_speed.scaled(120)) for host in hosts
    ]
  finally:
    for host in hosts:
      host.kill()
  assert [host.returncode for host in hosts] == [0, 0], ends
  leaves = jax.tree.leaves(params)
  norms = sum(x.nbytes for x in leaves if x.ndim == 1)
  matrices = sum(x.nbytes for x in leaves if x.ndim > 1)
  # Half of every matrix, and all of the scales, which every device keeps.
  expected = matrices // 2 + norms
  assert [int(out.split()[-1]) for out, _ in ends] == [expected, expected]
  again = safetensors.numpy.load_file(tmp_path / "again" / "model.safetensors")
  for file in several.glob("*.safetensors"):
    for name, tensor in safetensors.numpy.load_file(file).items():
      assert again.pop(name).tobytes() == tensor.tobytes(), name
  assert not again
