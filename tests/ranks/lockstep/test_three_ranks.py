"""Three ranks: a sum over them depends on its order, as one of two does not."""

import finetuning_runs
import numpy as np
import pytest
import resuming
import runs
from samples import LETTERS, NO_DROPOUT, write_config

from config.exchange_config import AllreduceConfig
from finetuning import finetune


def assert_equal(one, other):
  """Two run folders have the same losses, norms and weights to the last bit."""
  for key in ("grad_norm", "loss"):
    assert runs.metrics(one, key) == runs.metrics(other, key)
  np.testing.assert_equal(runs.weights(one), runs.weights(other))


@pytest.mark.parametrize(
  "allreduce",
  [
    {},
    pytest.param({"allreduce_groups": 0}, marks=pytest.mark.slow),
    pytest.param({"powersgd_rank": 2}, marks=pytest.mark.slow),
    pytest.param({"zero": 1}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_equal_runs_are_equal_to_the_bit(comm, plain, tmp_path, allreduce):
  folders = [tmp_path / name for name in ("one", "other")]
  for folder in folders:
    runs.pretrain(
      plain, folder, comm, train_batch_size=8, num_train_steps=12,
      allreduce=AllreduceConfig(**allreduce),
    )  # fmt: skip
    comm.gather(np.zeros(1))  # rank 0 has written all
  assert_equal(*folders)


@pytest.mark.slow
def test_three_ranks_equal_one_big_batch(comm, packed_run, tmp_path):
  """3 x 8 records of one to three examples."""
  tiny, one, global_batch = packed_run
  runs.pretrain(
    tiny, tmp_path, comm, do_eval=True, train_batch_size=8, num_train_steps=6,
    global_batch_size=global_batch,
    allreduce=AllreduceConfig(allreduce_groups=1),
  )  # fmt: skip
  comm.gather(np.zeros(1))
  runs.assert_alike(tmp_path, one)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
  "allreduce", [{"zero": 1}, {"powersgd_rank": 2}, {}], ids=str
)
def test_resumed_on_other_numbers_of_ranks(
  comm, at_root, plain, tmp_path, allreduce, optimizer
):
  optimizer = {"optimizer": optimizer}
  resuming.compare_ranks(
    comm, at_root, plain, tmp_path, allreduce, optimizer=optimizer
  )


@pytest.mark.slow
def test_equal_fine_tunings_are_equal_to_the_bit(comm, at_root, tmp_path):
  config, vocab = tmp_path / "config.json", tmp_path / "vocab.txt"
  sentences = tmp_path / "train.tsv"

  def write():
    write_config(config, **NO_DROPOUT)
    vocab.write_text("".join(f"{token}\n" for token in LETTERS))
    finetuning_runs.write_sentences(sentences, 90, seed=1)

  at_root(write)
  folders = [tmp_path / name for name in ("one", "other")]
  for folder in folders:
    task = finetuning_runs.classifier(
      str(config), str(vocab), folder, train_file=str(sentences),
      global_batch_size=18, train_batch_size=6, num_train_epochs=6.0,
    )  # fmt: skip
    finetune.finetune(task, comm)
    comm.gather(np.zeros(1))
  assert_equal(*folders)
