"""A model that two ranks hold together trains as the whole one does."""

from unittest import mock

import finetuning_runs
import numpy as np
import pytest
import reference_modern
import runs
from samples import LETTERS, write_config, write_packed, write_vocabulary

from checkpoints import metrics
from config.exchange_config import AllreduceConfig
from config.optimizers import OptimizerConfig
from finetuning import finetune
from gradients.distributed import Comm
from model.tensor_parallel import Slices

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


TWO_PASSES = dict(num_accumulation_steps=2, train_batch_size=8)
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  "name, changes",
  [
    ("embed", {}),
    ("embed", dict(zero=1, **TWO_PASSES)),
    ("classify", {}),
    ("answer", {}),
    slow("classify", dict(average_updates=2, evaluate_average=True)),
    slow("choose", dict(zero=1, **TWO_PASSES)),
    slow("label", dict(optimizer="muon")),
    slow("embed", dict(xla="layers", score_column="score")),
  ],
  ids=str,
)
def test_fine_tunings_of_slices_equal_the_whole(
  comm, slices, at_root, tmp_path, name, changes
):
  """With dropout; slices begin, and one rank goes on."""
  vocab = write_vocabulary(tmp_path / "vocab.txt", LETTERS)
  at_root(lambda: finetuning_runs.maker(name, tmp_path, vocab, **MODEL))
  make, changes = finetuning_runs.of_files(name, tmp_path, vocab), {**changes}
  # Where a gradient is 0 but for rounding, no update is of the rounding alone.
  optimizer = OptimizerConfig(
    optimizer=changes.pop("optimizer", "adamw"), epsilon=1e-4
  )
  allreduce = AllreduceConfig(zero=changes.pop("zero", 0))

  def train(folder, world, **more):
    settings = dict(
      do_eval=True, do_predict=True, dropout=0.1, warmup_proportion=0.0,
      lr_schedule="constant", optimizer=optimizer, allreduce=allreduce,
      **changes,
    )  # fmt: skip
    finetune.finetune(make(tmp_path / folder, **{**settings, **more}), world)

  at_root(lambda: train("whole", Comm()))
  copy = Slices.copy_to_group
  with mock.patch.object(Slices, "copy_to_group", autospec=True) as copied:
    copied.side_effect = copy
    train("run", slices, num_train_epochs=1.0, tensor_parallel=2)
  assert {call.args[0].size for call in copied.call_args_list} == {2}
  at_root(lambda: train("run", Comm()))
  folders = tmp_path / "run", tmp_path / "whole"
  assert len(runs.metrics(folders[0])) >= 6
  for key in ("loss", "grad_norm", "accuracy"):
    pair = [runs.metrics(folder, key) for folder in folders]
    if None not in pair[1]:
      np.testing.assert_allclose(*pair, rtol=1e-5, err_msg=key)
  weights = [runs.weights(folder) for folder in folders]
  assert weights[0].keys() == weights[1].keys()
  for weight, value in weights[1].items():
    np.testing.assert_allclose(
      weights[0][weight], value, atol=1e-6, err_msg=weight
    )
  logs = [metrics.read_jsonl(f / metrics.EVAL_METRICS_FILE) for f in folders]
  for of_slices, of_whole in zip(*logs, strict=True):
    for key, value in of_whole.items():
      same = value if isinstance(value, str) else pytest.approx(value, rel=1e-4)
      assert of_slices[key] == same, key


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
