"""Which devices a placement takes, on the eight virtual ones of the tests."""

import dataclasses

import jax
import pytest

from rl import placement

MeshSpec, Placement = placement.MeshSpec, placement.Placement


@pytest.mark.parametrize(
  ("place", "learner", "decode"),
  [
    (Placement(), [0], [1]),
    # The decode pool follows the learner's 2 * 2 devices.
    (
      Placement(learner=MeshSpec(data=2, expert=2), decode=MeshSpec(data=4)),
      [0, 1, 2, 3],
      [4, 5, 6, 7],
    ),
    (
      Placement(learner=MeshSpec(first_device=3), decode=MeshSpec(expert=2)),
      [3],
      [4, 5],
    ),
    (
      Placement(
        learner=MeshSpec(data=2, first_device=4),
        decode=MeshSpec(first_device=0),
      ),
      [4, 5],
      [0],
    ),
    (
      Placement(learner=MeshSpec(data=2), decode=MeshSpec(), colocated=True),
      [0, 1],
      [0],
    ),
    (
      Placement(decode=MeshSpec(first_device=2), colocated=True),
      [0],
      [2],
    ),
  ],
)
def test_devices_are_those_asked_for_or_the_next_free_ones(
  place, learner, decode
):
  place.validate()
  assert [list(r) for r in place.ranges] == [learner, decode]
  assert place.num_devices == max(learner + decode) + 1


OVERLAPPING = Placement(
  learner=MeshSpec(data=4), decode=MeshSpec(data=4, first_device=2)
)


def test_meshes_that_share_devices_are_refused():
  # Devices 0 to 3 and 2 to 5.
  with pytest.raises(ValueError, match=r"share devices \[2, 3\]; .*colocated"):
    OVERLAPPING.validate()


def test_meshes_may_share_devices_when_it_is_declared():
  place = Placement(
    learner=OVERLAPPING.learner, decode=OVERLAPPING.decode, colocated=True
  )
  place.validate()
  learner, decode = place.meshes()
  assert len(set(learner.devices.flat) & set(decode.devices.flat)) == 2


@pytest.mark.parametrize("name", ["learner", "decode"])
@pytest.mark.parametrize(
  "fields", [{"data": 0}, {"expert": -1}, {"first_device": -1}]
)
def test_a_mesh_without_devices_is_refused(name, fields):
  ((field, value),) = fields.items()
  message = rf"placement\.{name}\.{field}={value} is below"
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(Placement(), **{name: MeshSpec(**fields)}).validate()


def test_meshes_are_disjoint_and_have_their_shape_and_axes():
  place = Placement(
    learner=MeshSpec(data=2, expert=2), decode=MeshSpec(data=1, expert=4)
  )
  learner, decode = place.meshes()
  assert dict(learner.shape) == {"data": 2, "expert": 2}
  assert dict(decode.shape) == {"data": 1, "expert": 4}
  assert learner.axis_names == decode.axis_names == placement.AXES
  assert [*learner.devices.flat, *decode.devices.flat] == jax.devices()[:8]


def test_too_few_devices_are_refused_with_the_way_out():
  place = Placement(learner=MeshSpec(data=8), decode=MeshSpec(data=1))
  with pytest.raises(ValueError, match=r"needs 9 .* sees 8; .*colocated=true"):
    place.meshes()
