"""Which devices a placement takes, on the eight virtual ones of the tests."""

import dataclasses
import itertools
import sys

import jax
import pytest

from models import sharding
from rl.backends import addresses, local
from rl.pools import placement
from rl.settings import overrides

MeshSpec, Placement = placement.MeshSpec, placement.Placement
DecodePool = placement.DecodePool


@pytest.mark.parametrize(
  ("place", "learner", "decode"),
  [
    (Placement(), [0], [[1]]),
    # The decode pool follows the learner's 2 * 2 devices.
    (
      Placement(learner=MeshSpec(data=2, expert=2), decode=MeshSpec(data=4)),
      [0, 1, 2, 3],
      [[4, 5, 6, 7]],
    ),
    (
      Placement(learner=MeshSpec(first_device=3), decode=MeshSpec(expert=2)),
      [3],
      [[4, 5]],
    ),
    (
      Placement(
        learner=MeshSpec(data=2, first_device=4),
        decode=MeshSpec(first_device=0),
      ),
      [4, 5],
      [[0]],
    ),
    (
      Placement(learner=MeshSpec(data=2), decode=MeshSpec(), colocated=True),
      [0, 1],
      [[0]],
    ),
    (
      Placement(decode=MeshSpec(first_device=2), colocated=True),
      [0],
      [[2]],
    ),
    # Replicas lie side by side, in front of the learner if it is told so.
    (Placement(decode=MeshSpec(data=2), replicas=2), [0], [[1, 2], [3, 4]]),
    (
      Placement(
        learner=MeshSpec(first_device=2),
        decode=MeshSpec(first_device=0),
        replicas=2,
      ),
      [2],
      [[0], [1]],
    ),
    (
      Placement(learner=MeshSpec(data=2), replicas=3, colocated=True),
      [0, 1],
      [[0], [1], [2]],
    ),
    # A further pool lies behind everything before it: 2 + 2 * 2 devices, ...
    (
      Placement(
        learner=MeshSpec(data=2),
        decode=MeshSpec(data=2),
        replicas=2,
        more=(DecodePool(name="far", replicas=2),),
      ),
      [0, 1],
      [[2, 3], [4, 5], [6], [7]],
    ),
    # ... behind the learner too, if that stands behind the first pool, ...
    (
      Placement(
        learner=MeshSpec(first_device=1),
        decode=MeshSpec(first_device=0),
        more=(DecodePool(name="far", mesh=MeshSpec(tensor=2)),),
      ),
      [1],
      [[0], [2, 3]],
    ),
    # ... but behind pools only where the learner may be shared.
    (
      Placement(more=(DecodePool(name="far"),), colocated=True),
      [0],
      [[0], [1]],
    ),
  ],
)
def test_devices_are_those_asked_for_or_the_next_free_ones(
  place, learner, decode
):
  place.validate()
  assert [list(r) for r in place.ranges] == [learner, *decode]
  assert place.num_devices == max(itertools.chain(learner, *decode)) + 1
  devices = [layout.devices for layout in place.layouts()]
  assert [[d.id for d in part] for part in devices] == [learner, *decode]


OVERLAPPING = Placement(
  learner=MeshSpec(data=4), decode=MeshSpec(data=4, first_device=2)
)


def test_meshes_that_share_devices_are_refused():
  # Devices 0 to 3 and 2 to 5.
  with pytest.raises(ValueError, match=r"share devices \[2, 3\]; .*colocated"):
    OVERLAPPING.validate()


def test_a_replica_that_lies_on_the_learner_is_refused():
  # The second one takes devices 2 and 3.
  place = Placement(
    learner=MeshSpec(first_device=3),
    decode=MeshSpec(data=2, first_device=0),
    replicas=2,
  )
  with pytest.raises(ValueError, match=r"decode x 2 replicas share .*\[3\]"):
    place.validate()


@pytest.mark.parametrize("replicas", [0, -1])
def test_a_pool_without_replicas_is_refused(replicas):
  with pytest.raises(
    ValueError, match=rf"placement\.replicas={replicas} must be"
  ):
    Placement(replicas=replicas).validate()


def test_two_decode_pools_that_share_devices_are_refused():
  # The learner has device 0, the first pool 1 to 4, the other 3 to 4.
  far = DecodePool(name="far", mesh=MeshSpec(data=2, first_device=3))
  place = Placement(decode=MeshSpec(data=2), replicas=2, more=(far,))
  message = (
    r"^placement\.decode x 2 replicas and placement\.more\.0\.mesh share "
    r"devices \[3, 4\]; move placement\.more\.0\.mesh\.first_device"
  )
  with pytest.raises(ValueError, match=message):
    place.validate()
  dataclasses.replace(place, colocated=True).validate()


def test_every_engine_has_the_name_and_kind_of_its_pool():
  far = DecodePool(name="far", replicas=2, kind="compute", cost=2.85)
  place = Placement(decode_kind="bandwidth", decode_cost=0.5, more=(far,))
  place.validate()
  first = placement.EngineInfo("decode", "bandwidth")
  second = placement.EngineInfo("far", "compute")
  assert place.engine_infos == (first, second, second)
  assert [pool.cost for pool in place.pools] == [0.5, 2.85]
  # One layout more, the learner's, with the rules for decoding everywhere.
  _, *layouts = place.layouts()
  assert [layout.rules for layout in layouts] == [sharding.DECODE] * 3


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"name": "decode"}, r"more\.0\.name='decode' is taken"),
    ({"name": "compute"}, r"more\.0\.name='compute' is taken"),
    ({"name": ""}, r"more\.0\.name='' is taken"),
    ({"cost": 0.0}, r"more\.0\.cost=0\.0 must be a finite number above 0"),
    ({"cost": float("nan")}, r"more\.0\.cost=nan must be a finite"),
    ({"replicas": 0}, r"more\.0\.replicas=0 must be at least 1"),
    ({"mesh": MeshSpec(data=0)}, r"more\.0\.mesh\.data=0 must be at least 1"),
    (
      {"mesh": MeshSpec(rules=sharding.Rules(heads="tensors"))},
      r"more\.0\.mesh\.rules\.heads=tensors",
    ),
  ],
)
def test_a_pool_that_cannot_be_is_refused(fields, message):
  far = DecodePool(**({"name": "far"} | fields))
  with pytest.raises(ValueError, match=rf"^placement\.{message}"):
    Placement(more=(far,)).validate()


def test_two_pools_of_one_name_are_refused_and_the_first_has_a_cost_too():
  twins = (DecodePool(name="far"), DecodePool(name="far"))
  with pytest.raises(ValueError, match=r"more\.1\.name='far' is taken"):
    Placement(more=twins).validate()
  with pytest.raises(ValueError, match=r"placement\.decode_cost=-1\.0 must be"):
    Placement(decode_cost=-1.0).validate()


def test_pools_are_set_from_the_command_line():
  text = 'rl.pools.placement.DecodePool(name="far", kind="compute", cost=2.85)'
  place = overrides.override(Placement(), "more", text)
  place = overrides.override(place, "more.0.mesh.data", "2")
  place = overrides.override(place, "decode_kind", "bandwidth")
  place.validate()
  assert [(x.name, x.kind, x.mesh.data) for x in place.pools] == [
    ("decode", "bandwidth", 1),
    ("far", "compute", 2),
  ]
  assert overrides.from_json(overrides.to_json(place)) == place


def test_meshes_may_share_devices_when_it_is_declared():
  place = Placement(
    learner=OVERLAPPING.learner, decode=OVERLAPPING.decode, colocated=True
  )
  place.validate()
  learner, decode = (set(layout.devices) for layout in place.layouts())
  assert len(learner & decode) == 2


@pytest.mark.parametrize("name", ["learner", "decode"])
@pytest.mark.parametrize(
  "fields", [{"data": 0}, {"expert": -1}, {"first_device": -1}]
)
def test_a_mesh_without_devices_is_refused(name, fields):
  ((field, value),) = fields.items()
  message = rf"placement\.{name}\.{field}={value} must be at"
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(Placement(), **{name: MeshSpec(**fields)}).validate()


def test_only_the_learner_splits_rows():
  Placement(learner=MeshSpec(context=2)).validate()
  message = r"placement\.decode\.context=2: only the learner splits rows; use 1"
  with pytest.raises(ValueError, match=message):
    Placement(decode=MeshSpec(context=2)).validate()


def test_meshes_are_disjoint_and_have_their_shape_and_axes():
  place = Placement(
    learner=MeshSpec(data=2, tensor=2), decode=MeshSpec(data=1, expert=4)
  )
  layouts = place.layouts()
  learner, decode = (layout.mesh for layout in layouts)
  ones = dict.fromkeys(sharding.MESH_AXES, 1)
  assert dict(learner.shape) == ones | {"data": 2, "tensor": 2}
  assert dict(decode.shape) == ones | {"expert": 4}
  assert learner.axis_names == decode.axis_names == sharding.MESH_AXES
  assert [*layouts[0].devices, *layouts[1].devices] == jax.devices()[:8]


@pytest.mark.parametrize(
  ("platform", "extra"), [("gpu", "cuda"), ("tpu", "tpu")]
)
def test_a_platform_that_jax_lacks_is_answered_with_its_extra(platform, extra):
  if placement.has_plugin(platform):
    pytest.skip("installed")
  with pytest.raises(
    ValueError, match=rf"'twinmesh\[{extra}\]', or use --conf"
  ):
    Placement(platform=platform).layouts()


def test_a_plan_is_the_layout_without_its_devices():
  rules = sharding.Rules(vocab=None)
  place = Placement(
    learner=MeshSpec(data=2, expert=2, rules=rules), decode=MeshSpec(tensor=2)
  )
  pairs = zip((place.learner, place.decode), place.layouts(), strict=True)
  for spec, layout in pairs:
    assert spec.plan.rules == layout.rules == spec.rules
    assert spec.plan.mesh.shape == layout.mesh.shape
    assert spec.plan.mesh.axis_types == layout.mesh.axis_types
  # 64 chips are more than there are.
  far = MeshSpec(data=8, expert=4, tensor=2).plan
  up = far.sharding("experts", "embed", "mlp")
  assert up.shard_shape((128, 4096, 1536)) == (32, 512, 768)


def test_rules_are_set_from_the_command_line():
  place = Placement()
  for path, text, expected in (
    ("learner.rules.embed", "none", None),
    ("learner.rules.vocab", "data,tensor", ("data", "tensor")),
    ("learner.rules.mlp", '("data", "tensor")', ("data", "tensor")),
    ("decode.rules.heads", "tensor", ("tensor",)),
  ):
    changed = overrides.override(place, path, text)
    pool, _, axis = path.split(".")
    assert getattr(getattr(changed, pool).rules, axis) == expected
    assert overrides.from_json(overrides.to_json(changed)) == changed


def test_too_few_devices_are_refused_with_the_way_out():
  place = Placement(learner=MeshSpec(data=8), decode=MeshSpec(data=1))
  with pytest.raises(ValueError, match=r"needs 9 .* sees 8; .*colocated=true"):
    place.layouts()
  # 1 + 2 * 4 devices.
  place = Placement(decode=MeshSpec(data=4), replicas=2)
  with pytest.raises(ValueError, match=r"needs 9 .*or placement\.replicas=2"):
    place.layouts()


def test_more_devices_than_there_can_be_are_refused_at_once():
  # A range of them must not be walked: that took all of the memory.
  place = placement.Placement(replicas=10**10)
  with pytest.raises(ValueError, match=r"needs 10000000001 devices, 1048576"):
    place.validate()


def test_an_engine_in_another_process_needs_no_device_of_this_one():
  far = placement.DecodePool(name="far", replicas=2, processes=1)
  near = placement.DecodePool(name="near")
  place = Placement(decode=MeshSpec(tensor=2), more=(far, near))
  place.validate()
  # Devices 0, 1 and 2 here, 3 and 4 in others, 5 here again.
  assert place.remote == (1, 2)
  assert place.num_devices == 6
  learner, *engines = place.layouts()
  assert learner.devices == jax.devices()[:1]
  assert [isinstance(x.mesh, jax.sharding.Mesh) for x in engines] == [
    True,
    False,
    False,
    True,
  ]
  assert engines[3].devices == jax.devices()[5:6]
  assert Placement(decode_processes=1).num_devices == 1


def test_a_learner_in_other_processes_has_one_device_of_this_one():
  learner = MeshSpec(data=2, expert=2)
  place = Placement(
    learner=learner, decode_processes=1, learner_processes=2, platform="cpu"
  )
  place.validate()
  # One for states on their way; the engine's would be device 4.
  assert place.num_devices == 1
  assert place.ranges == (range(4), range(4, 5))
  here, _ = place.layouts()
  assert here.devices == jax.devices()[:1]
  assert place.learner.plan.num_batch == 4


ELSEWHERE = Placement(
  learner=MeshSpec(data=2),
  learner_processes=2,
  decode_processes=1,
  platform="gpu",
  device_gib=80,
  backend=addresses.KnownAddresses(at=("10.0.0.2:7000",)),
)


def test_devices_of_other_hosts_only_leave_this_one_its_processor():
  ELSEWHERE.validate()
  assert ELSEWHERE.own_platform == "cpu"
  here, engine = ELSEWHERE.layouts()
  assert here.devices == jax.devices("cpu")[:1]
  assert not isinstance(engine.mesh, jax.sharding.Mesh)
  # That of this host's processor is not what is planned for.
  memory = ELSEWHERE.memory(jax.devices("cpu"))
  assert memory == placement.Memory(72 * 2**30)


@dataclasses.dataclass(frozen=True)
class Device:
  platform: str
  compute_capability: str = ""


@pytest.mark.parametrize(
  ("place", "devices", "dtype"),
  [
    (Placement(platform="cpu"), (), "float32"),
    (Placement(platform="tpu"), (), "bfloat16"),
    # A laptop plans for a pod.
    (Placement(device_gib=80), (), "bfloat16"),
    (Placement(device_gib=80), jax.devices("cpu"), "float32"),
    (Placement(), jax.devices("cpu"), "float32"),
    (Placement(), [Device("tpu")], "bfloat16"),
    (Placement(), [Device("gpu", "9.0")], "bfloat16"),
    (Placement(), [Device("gpu", "12.0")], "bfloat16"),
    # Neither cuDNN's attention nor Triton: of another maker, and a T4.
    (Placement(), [Device("gpu", "gfx942")], "float32"),
    (Placement(platform="gpu"), [Device("gpu", "7.5")], "float32"),
    # This host's processor has no part in it.
    (ELSEWHERE, jax.devices("cpu"), "bfloat16"),
    (
      dataclasses.replace(ELSEWHERE, platform=None, device_gib=None),
      (),
      "float32",
    ),
  ],
)
def test_the_dtype_is_the_one_that_the_devices_are_made_for(
  place, devices, dtype
):
  assert place.dtype(devices) == dtype


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"device_gib": None}, "device_gib is missing"),
    ({"backend": local.Local()}, "on CPUs so far, not on a GPU"),
    ({"decode_processes": 0}, "on CPUs so far, not on a GPU"),
    ({"learner_processes": 1}, "on CPUs so far, not on a GPU"),
  ],
)
def test_a_device_of_this_host_is_no_accelerator_beside_others(changes, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(ELSEWHERE, **changes).validate()


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    (
      {"learner": MeshSpec(data=4), "learner_processes": 10**30},
      r"learner_processes=10{30} does not divide the 4 .*; use 4, or",
    ),
    (
      {"learner": MeshSpec(data=4), "learner_processes": 3},
      r"learner_processes=3 does not divide the 4 devices of .*; use 2, or",
    ),
    (
      {"learner_processes": 2},
      r"learner_processes=2 does not .*, such as placement\.learner\.data=2$",
    ),
    ({"learner_processes": 0}, r"learner_processes=0 must be at least 1"),
    (
      {
        "learner": MeshSpec(data=2),
        "learner_processes": 2,
        "platform": "tpu",
      },
      "learner_processes=2: .* on CPUs so far, not on a TPU; use 1",
    ),
    ({"decode_processes": 2}, r"decode_processes=2 must be 0 or 1"),
    ({"decode_processes": -1}, r"decode_processes=-1 must be 0 or 1"),
    (
      {"decode_processes": 1, "platform": "gpu"},
      "decode_processes=1: .* on CPUs so far, not on a GPU; use 0",
    ),
    (
      {"more": (placement.DecodePool(name="far", processes=3),)},
      r"placement\.more\.0\.processes=3 must be 0 or 1",
    ),
    (
      {"decode_python": "python"},
      r"decode_python=python with .*decode_processes=0: .*decode_processes=1$",
    ),
    (
      {"more": (placement.DecodePool(name="far", role="prefill"),)},
      "pool far has role=prefill, but the engines of decode are in this .*"
      r"use placement\.decode_processes=1, and processes=1 of every other",
    ),
    (
      {
        "decode_processes": 1,
        "more": (placement.DecodePool(name="far", role="prefill"),),
      },
      "pool far has role=prefill, but the engines of far are in this process",
    ),
    (
      {"more": (placement.DecodePool(name="far", python="python"),)},
      r"placement\.more\.0\.python=python with .*; use .*0\.processes=1$",
    ),
  ],
)
def test_processes_that_cannot_be_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    Placement(**changes).validate()


def test_processes_without_their_packages_name_the_extra(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(
    ValueError, match=r"needs websockets and msgpack: .*twinmesh\[processes\]"
  ):
    Placement(decode_processes=1).validate()


@pytest.mark.parametrize(
  ("script", "words"),
  [
    (None, "does not run as a Python: .*No such file"),
    ("exit 1", "does not run as a Python"),
    (
      "echo jax msgpack",
      r"the Python of pool decode needs jax and msgpack: .*/python -m pip "
      r"install 'twinmesh\[processes\]'",
    ),
  ],
)
@pytest.mark.process
def test_a_python_that_cannot_run_an_engine_is_refused(tmp_path, script, words):
  python = tmp_path / "python"
  if script:
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
  place = Placement(decode_processes=1, decode_python=str(python))
  with pytest.raises(ValueError, match=words):
    place.validate_installed()


@pytest.mark.process
def test_a_python_with_all_packages_is_accepted():
  here = Placement(decode_processes=1, decode_python=sys.executable)
  here.validate_installed()
  Placement().validate_installed()


def test_a_pool_encodes_for_others_if_it_says_so():
  far = DecodePool(name="far", role="prefill", processes=1)
  place = Placement(decode_processes=1, more=(far,))
  place.validate()
  assert [info.role for info in place.engine_infos] == ["decode", "prefill"]
  text = 'rl.pools.placement.DecodePool(name="far",role="%s",processes=1)'
  place = Placement(decode_processes=1)
  said = overrides.override(place, "more", f"[{text % 'prefill'}]")
  assert said.more == (far,)
  with pytest.raises(ValueError, match=r"role=prefil: .* did you mean prefill"):
    overrides.override(place, "more", f"[{text % 'prefil'}]")
