"""Texts are compared over two ranks or three, however an update is cut."""

import finetuning_runs
import numpy as np
import pytest
import runs
from samples import LETTERS, NO_DROPOUT, write_config

from config.exchange_config import AllreduceConfig
from finetuning import finetune
from gradients.distributed import Comm

GROUPS = 96  # of an update, in 48 records: as many on each of any ranks
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def train(session_folder, at_root):
  """(folder, ranks, **changes) -> a training; texts occur on several ranks."""
  config, vocab = session_folder / "texts.json", session_folder / "texts.txt"
  pairs = {n: session_folder / f"texts-{n}.jsonl" for n in ("train", "eval")}

  def write():
    write_config(config, **NO_DROPOUT)
    vocab.write_text("".join(f"{t}\n" for t in LETTERS))
    for name, count in (("train", 130), ("eval", 9)):
      finetuning_runs.write_pairs(pairs[name], count, count)

  def run(folder, ranks, **changes):
    task = finetuning_runs.embedder(
      str(config), str(vocab), folder, do_eval=True, do_predict=True,
      train_file=str(pairs["train"]), eval_file=str(pairs["eval"]),
      predict_file=str(pairs["eval"]), negative_columns=("negative",),
      both_directions=True, num_train_epochs=4.0, examples_per_record=2,
      **changes,
    )  # fmt: skip
    finetune.finetune(task, ranks)

  at_root(write)
  return run


@pytest.fixture(scope="module")
def whole(session_folder, at_root, train):
  """The folder of the training by one rank in one pass."""
  folder = session_folder / "texts-whole"
  sizes = dict(global_batch_size=GROUPS, train_batch_size=GROUPS)
  at_root(lambda: train(folder, Comm(), **sizes))
  return folder


@pytest.mark.parametrize("dropout", [0.0, slow(0.1)])
@pytest.mark.parametrize(
  "accumulation, allreduce",
  [(1, {}), (8, {"zero": 1}), slow(1, {"zero": 1}), slow(2, {}),
   slow(2, {"zero": 1}), slow(8, {})],
  ids=str,
)  # fmt: skip
def test_ranks_equal_one(
  comm, whole, train, tmp_path, accumulation, allreduce, dropout
):
  """With dropout, which depends on the cut, only another exchange is equal."""
  cut = dict(
    dropout=dropout, num_accumulation_steps=accumulation,
    train_batch_size=GROUPS // comm.size // accumulation,
  )  # fmt: skip
  if dropout:
    whole = tmp_path / "plain"
    train(whole, comm, **cut)
  cut["allreduce"] = AllreduceConfig(**allreduce)
  folder = tmp_path / "cut"
  train(folder, comm, **cut)
  comm.gather(np.zeros(1))  # rank 0 has written all
  plan = runs.read_json(folder, "run.json")["runs"][0]["plan"]
  assert (plan["ranks"], plan["accumulation"]) == (comm.size, accumulation)
  assert len(runs.metrics(whole)) >= 5
  for key in ("loss", "grad_norm", "accuracy"):
    np.testing.assert_allclose(
      runs.metrics(folder, key), runs.metrics(whole, key), rtol=1e-6
    )
  weights = runs.weights(folder)
  for name, value in runs.weights(whole).items():
    np.testing.assert_allclose(weights[name], value, atol=1e-6, err_msg=name)
  vectors = [np.load(f / "vectors.npy") for f in (whole, folder)]
  np.testing.assert_allclose(*vectors, atol=1e-6)
  results = [runs.read_json(f, "eval_results.json") for f in (whole, folder)]
  assert results[0] == pytest.approx(results[1], rel=1e-4)
