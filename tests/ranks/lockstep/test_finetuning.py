"""Fine-tuning on two ranks: the losses and predictions of one."""

import json

import finetuning_runs
import numpy as np
import pytest
import runs
from samples import LETTERS, NO_DROPOUT, write_config

from finetuning import finetune
from gradients.distributed import Comm

# Task -> how its files are written, their ending, how many examples are in the
# training, evaluation and prediction set, and the file of its predictions. In
# the evaluation set is one row, of which the second rank has none.
KINDS = {
  finetuning_runs.classifier: (
    finetuning_runs.write_sentences, "tsv", (61, 1, 21), "predictions.tsv"
  ),
  finetuning_runs.multi_label_task: (
    finetuning_runs.write_sets, "jsonl", (61, 1, 21), "predictions.tsv"
  ),
  finetuning_runs.squad_task: (
    finetuning_runs.write_questions, "json", (15, 1, 5), "predictions.json"
  ),
  finetuning_runs.ner_task: (
    finetuning_runs.write_words, "conll", (61, 1, 21), "predictions.tsv"
  ),
}  # fmt: skip
SLOW = (finetuning_runs.squad_task, finetuning_runs.ner_task)


@pytest.mark.parametrize(
  "make",
  [
    pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW))
    for kind in KINDS
  ],
  ids=["classifier", "multi_label", "squad", "ner"],
)
def test_two_ranks_equal_one(comm, at_root, tmp_path, make):
  config, vocab = str(tmp_path / "config.json"), str(tmp_path / "vocab.txt")
  write_one, ending, counts, predictions = KINDS[make]
  is_squad = make is finetuning_runs.squad_task
  files = {n: tmp_path / f"{n}.{ending}" for n in ("train", "eval", "predict")}

  def write():
    write_config(tmp_path / "config.json", **NO_DROPOUT)
    (tmp_path / "vocab.txt").write_text("".join(f"{t}\n" for t in LETTERS))
    for path, count in zip(files.values(), counts, strict=True):
      write_one(path, count, count)

  def run(folder, world, micro_batch):
    names = ("train", "predict") if is_squad else tuple(files)
    task = make(
      config, vocab, folder, do_eval=True, do_predict=True,
      global_batch_size=16, train_batch_size=micro_batch,
      **{f"{name}_file": str(files[name]) for name in names},
    )  # fmt: skip
    finetune.finetune(task, world)

  one, two = tmp_path / "one", tmp_path / "two"
  at_root(write)
  at_root(lambda: run(one, Comm(), 16))
  run(two, comm, 5)
  comm.gather(np.zeros(1))  # rank 0 has written all
  plan = runs.read_json(two, "run.json")["runs"][0]["plan"]
  assert plan["ranks"] == 2 and plan["accumulation"] > 1
  assert len(runs.metrics(one)) >= 6
  for key in ("loss", "grad_norm", "accuracy"):
    np.testing.assert_allclose(
      runs.metrics(two, key), runs.metrics(one, key), rtol=1e-5, atol=1e-6
    )
  results = [runs.read_json(f, "eval_results.json") for f in (one, two)]
  assert results[0] == pytest.approx(results[1], rel=1e-4)
  texts = [(folder / predictions).read_text() for folder in (one, two)]
  if is_squad:
    assert json.loads(texts[0]) == json.loads(texts[1])
  else:
    rows = [[line.split("\t") for line in t.splitlines()] for t in texts]
    assert [r[:2] for r in rows[0]] == [r[:2] for r in rows[1]]
    if len(rows[0][0]) > 2:  # a probability of each label, below a header
      shares = [np.array([r[2:] for r in one[1:]], float) for one in rows]
      np.testing.assert_allclose(*shares, atol=1e-4)
