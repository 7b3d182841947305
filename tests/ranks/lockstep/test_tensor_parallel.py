"""A model that two ranks hold together trains as the whole one does."""

import numpy as np
import pytest
import reference_modern
import runs
from samples import write_config, write_packed

# A vocabulary that two slices cannot share evenly.
MODEL = dict(vocab_size=101, num_attention_heads=4)
WORDS = "bert/embeddings/word_embeddings"
AVERAGED = dict(average_updates=2, evaluate_average=True)


@pytest.mark.parametrize(
  "changes",
  [
    dict(train_batch_size=12, initial_weights="informed", z_loss=0.01),
    dict(optimizer={"optimizer": "muon"}, **AVERAGED),
    pytest.param(dict(xla="layers"), marks=pytest.mark.slow),
    pytest.param(dict(xla="layers", precision="bf16"), marks=pytest.mark.slow),
    pytest.param(dict(model="ModernBERT"), marks=pytest.mark.slow),
    pytest.param(dict(model="EuroBERT"), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_slices_equal_the_whole(comm, slices, at_root, tmp_path, changes):
  """With dropout, of which each slice draws its own heads' part."""
  tiny = str(tmp_path / "config.json"), f"{tmp_path}/data-*.tfrecord"
  changes, model = dict(changes), dict(MODEL)
  name = changes.pop("model", None)
  if name:
    model |= reference_modern.ARCHITECTURES[name]
  if "num_key_value_heads" in model:
    model["num_key_value_heads"] = 2  # one for each slice
  changes["segment_ids"] = model.get("type_vocab_size") != 0
  settings = dict(do_eval=True, dropout=0.1, num_train_steps=4, **changes)

  def whole():
    config = write_config(tmp_path / "config.json", **model)
    _, global_batch = write_packed(tmp_path)
    runs.pretrain(
      (config, tiny[1]), tmp_path / "whole", global_batch_size=global_batch,
      **settings,
    )  # fmt: skip
    return global_batch

  settings["global_batch_size"] = at_root(whole)
  settings["tensor_parallel"] = 2
  runs.pretrain(tiny, tmp_path / "run", slices, **settings)
  comm.gather(np.zeros(1))  # rank 0 has written all
  rtol = 2e-2 if "precision" in changes else 1e-5
  runs.assert_alike(tmp_path / "run", tmp_path / "whole", rtol)
  found = [runs.weights(tmp_path / f) for f in ("run", "whole")]
  shapes = [{n: v.shape for n, v in values.items()} for values in found]
  assert shapes[0] == shapes[1]
  averages = [name for name in found[0] if name.endswith("/average")]
  assert bool(averages) == ("average_updates" in changes)
  for name in averages:
    pair = [values[name] for values in found]
    np.testing.assert_allclose(*pair, rtol=1e-3, atol=1e-5, err_msg=name)


def test_slices_begin_and_end_averages(comm, slices, plain, tmp_path):
  """In mid-run, from the weights."""
  settings = dict(
    tensor_parallel=2,
    lr_schedule="constant",
    num_warmup_steps=0,
    save_checkpoints_steps=1,
  )
  for updates, more in ((2, {}), (4, dict(average_updates=1)), (5, {})):
    runs.pretrain(
      plain, tmp_path, slices, num_train_steps=updates, **settings, **more
    )
    comm.gather(np.zeros(1))  # rank 0 has written all
    found = runs.weights(tmp_path)
    assert (f"{WORDS}/average" in found) == bool(more)
    if more:  # over one update they are the weights
      pair = found[f"{WORDS}/average"], found[WORDS]
      np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-7)


def test_a_slice_holds_its_part_of_a_layer(
  slices, plain, whole_sizes, tmp_path
):
  """Half of the matrices; output biases and layer norms are whole."""
  here = runs.graph_sizes(plain, tmp_path, slices, tensor_parallel=2)
  assert here.keys() == whole_sizes.keys()
  # Weights and their moments.
  layer = lambda sizes: sum(n for v, n in sizes.items() if "/layer_0/" in v)
  held = slices.gather(np.array([layer(here), here[WORDS]]))
  assert held[:, 0].max() < 0.55 * layer(whole_sizes)
  assert held[:, 1].sum() == whole_sizes[WORDS]
