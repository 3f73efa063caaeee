"""Owners of segments, on the way to disk and back."""

import numpy as np
import pytest

from rl.data import batch, segment_index, trajectory


def _member(group, index, context, tokens):
  turn = trajectory.Turn(
    context=np.array(context, np.int32),
    tokens=np.array(tokens, np.int32),
    logprobs=np.zeros(len(tokens), np.float32),
    versions=np.zeros(len(tokens), np.int32),
    stop="stop",
  )
  return trajectory.Trajectory(
    f"game/train/{group}",
    group,
    index,
    [turn],
    trajectory.Status.COMPLETED,
    1.0,
  )


def test_members_of_a_group_own_what_is_theirs_and_not_their_prompt():
  # 2 ids are shared; each has 2 of its own. The last has sampled nothing.
  members = [_member(7, i, [1, 2], [3 + i, 5]) for i in range(2)]
  members.append(_member(8, 0, [1, 2, 3], []))
  packed = batch.pack(members, rows=2, length=8, version=0, share_prompts=True)
  found = list(segment_index.of(packed, members, first=4))
  assert [x[3:] for x in found] == [
    ("game/train/7", 7, 0),
    ("game/train/7", 7, 1),
  ]
  for owner, member in zip(found, members, strict=False):
    assert owner.batch == 4
    own = packed.batches[0].segments[owner.row] == owner.segment
    ids = packed.batches[0].tokens[owner.row][own]
    assert ids.tolist() == member.turns[0].tokens.tolist()


def test_what_is_written_is_read(tmp_path):
  kept = [segment_index.Owner(0, 1, 2, "game/train/\u00df", 7, 3)]
  segment_index.write(tmp_path / "owners.json", kept)
  assert segment_index.read(tmp_path / "owners.json") == kept
  assert str(kept[0]) == "group 7 member 3 of game/train/\u00df"
  assert segment_index.read(tmp_path / "nothing.json") == []


@pytest.mark.parametrize(
  "text",
  [
    "[[1, 2]]",
    "7",
    "[[1",
    "[[0, 1, 2, 3, 4, 5]]",
    '[[true, 1, 2, "t", 4, 5]]',
    '[[0, 1, 2, "t", 4, 5, 6]]',
    "[" * 9999,
  ],
)
def test_what_holds_no_owners_is_refused(tmp_path, text):
  (tmp_path / "owners.json").write_text(text)
  with pytest.raises(ValueError, match=r"owners\.json (holds|must|is) .*; "):
    segment_index.read(tmp_path / "owners.json")
