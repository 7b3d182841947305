"""--profile_steps: what is recorded, and where."""

import pytest
import runs
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from common.errors import UserError


def recorded(folder):
  """Paths of the recordings, and name -> list of events of all of them."""
  paths = sorted(folder.glob("train/plugins/profile/*/*.xplane.pb"))
  events = {}
  for path in paths:
    for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
      stats = {n: stat.name for n, stat in plane.stat_metadata.items()}
      for line in plane.lines:
        for event in line.events:
          name = plane.event_metadata[event.metadata_id].name
          found = {stats[s.metadata_id]: s.int64_value for s in event.stats}
          events.setdefault(name, []).append(found)
  return paths, events


@pytest.mark.slow
def test_the_window_has_our_ops_and_its_updates(tiny_run, tmp_path, capfd):
  settings = dict(profile_steps=("4", "5"), num_train_steps=7)
  runs.pretrain(tiny_run, tmp_path, train_batch_size=12, **settings)
  said = capfd.readouterr().err
  assert f"profile     {tmp_path}/train, for TensorBoard" in said
  # Beside events, or TensorBoard would find it in this folder only.
  assert list(tmp_path.glob("train/events*"))
  paths, events = recorded(tmp_path)
  assert len(paths) == 1
  assert [e["step_num"] for e in events["update"]] == [4, 5]
  counts = lambda words: {
    len(found) for name, found in events.items() if words in name
  }
  # Two updates of two micro-batches, forward and backward.
  assert 4 in counts("bert/encoder/layer_0/intermediate/MatMul")
  assert 4 in counts("gradients/bert/encoder/layer_0/output_1/MatMul_grad")
  assert counts(":ResourceApplyAdam") == {2}

  # The same command goes on; the window is behind it.
  settings["num_train_steps"] = 9
  runs.pretrain(tiny_run, tmp_path, **settings)
  assert "profile     none: " in capfd.readouterr().err
  assert recorded(tmp_path)[0] == paths


@pytest.mark.parametrize(
  "words", [["5"], ["5", "4"], ["0", "3"], ["a", "b"], ["1", "2", "3"]]
)
def test_what_is_no_window_is_refused(tiny_run, tmp_path, words):
  with pytest.raises(
    UserError, match=f"--profile_steps={','.join(words)}: want FIRST,LAST"
  ):
    runs.config(tiny_run, tmp_path, profile_steps=tuple(words))
