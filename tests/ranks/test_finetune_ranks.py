"""Fine-tuning on two ranks, as commands: the same losses as on one."""

import json

import conftest
import finetuning_runs
import numpy as np
import pytest
import runs

from training import run_folder


def commands(tmp_path, letters):
  """Script -> its flags, and the files that it predicts."""
  config = conftest.write_config(
    tmp_path / "config.json", **conftest.NO_DROPOUT
  )
  shared = [
    "--do_train", "--do_eval", "--do_predict", "--max_seq_length=64",
    f"--bert_config_file={config}", f"--vocab_file={letters}",
    "--global_batch_size=16", "--learning_rate=1e-3", "--num_train_epochs=2",
    "--log_every_steps=1", "--xla=off", "--bias_correction",
  ]  # fmt: skip
  sentences, questions = (
    finetuning_runs.write_sentences, finetuning_runs.write_questions,
  )  # fmt: skip
  return {
    "run_classifier.py": [
      *shared,
      f"--train_file={sentences(tmp_path / 'a.tsv', 61, 1)}",
      # One row, of which the second rank has none.
      f"--eval_file={sentences(tmp_path / 'c.tsv', 1, 3)}",
      f"--predict_file={sentences(tmp_path / 'b.tsv', 21, 2)}",
    ],
    "run_squad.py": [
      *shared,
      "--max_query_length=8",
      "--doc_stride=16",
      f"--train_file={questions(tmp_path / 'a.json', 15, 1)}",
      f"--predict_file={questions(tmp_path / 'b.json', 5, 2)}",
    ],
  }


@pytest.mark.parametrize(
  "script, predictions",
  [
    ("run_classifier.py", "predictions.tsv"),
    pytest.param("run_squad.py", "predictions.json", marks=pytest.mark.slow),
  ],
)
def test_two_ranks_equal_one(tmp_path, letters, script, predictions):
  flags = commands(tmp_path, letters)[script]
  for ranks, micro_batch in ((1, 16), (2, 5)):
    folder = tmp_path / str(ranks)
    process = runs.launch(
      [
        f"{runs.ROOT}/{script}", *flags, f"--output_dir={folder}",
        f"--train_batch_size={micro_batch}",
      ],
      ranks,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
  one, two = (tmp_path / name for name in "12")
  plan = runs.read_json(two, run_folder.RUN_FILE)["runs"][0]["plan"]
  assert plan["ranks"] == 2 and plan["accumulation"] > 1
  assert len(runs.metrics(one)) >= 6
  for key in ("loss", "grad_norm", "accuracy"):
    np.testing.assert_allclose(
      runs.metrics(two, key), runs.metrics(one, key), rtol=1e-5, atol=1e-6
    )
  results = [runs.read_json(f, "eval_results.json") for f in (one, two)]
  assert results[0] == pytest.approx(results[1], rel=1e-4)
  texts = [(folder / predictions).read_text() for folder in (one, two)]
  if script == "run_squad.py":
    assert json.loads(texts[0]) == json.loads(texts[1])
  else:
    rows = [[line.split("\t") for line in t.splitlines()] for t in texts]
    assert [r[:2] for r in rows[0]] == [r[:2] for r in rows[1]]
