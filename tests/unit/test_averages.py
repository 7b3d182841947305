"""Averages of weights: NumPy's, over stops and stages, evaluated, exported."""

import json

import numpy as np
import pytest
import resuming
import runs
from conversions import convert, read, refused
from finetuning_runs import command_line, maker, run

from checkpoints import metrics
from checkpoints.checkpoint_files import CheckpointError
from config import stages
from config.pretraining import PretrainingConfig
from finetuning import classification
from gradients import spikes
from interop import run_settings

KEPT = dict(
  save_checkpoints_steps=1, keep_checkpoints=99, lr_schedule="constant"
)
STAGE = stages.read_item({"num_train_steps": 4}, "a stage")
WORDS = "bert/embeddings/word_embeddings"


def values(folder, step, ending=""):
  """Weight -> its value, or its average's, at an update."""
  found = read(f"{folder}/model.ckpt-{step}")
  trained = [name for name in found if f"{name}/adam_m" in found]
  trained += [name for name in found if f"{name}/muon_m" in found]
  return {n: found[n + ending] for n in trained if n + ending in found}


def assert_averaged(folder, span, updates, first=1, every=None):
  """All averages at the last of `updates` are NumPy's, from `first` on."""
  skipped = runs.metrics(folder, "skipped")
  every, samples, want = every or max(1, span // 10), 0, {}
  for step in range(first, updates + 1):
    if step % every or skipped[step - 1]:
      continue
    samples += 1
    for name, weights in values(folder, step).items():
      rate = max(1 / samples, every / span)
      before = want.get(name, 0.0)
      want[name] = before + rate * (weights.astype(np.float64) - before)
  assert samples > 2 and len(want) > 20
  got = values(folder, updates, "/average")
  for name, average in want.items():
    np.testing.assert_allclose(got[name], average, rtol=1e-5, atol=1e-6)
  moved = np.abs(got[WORDS] - values(folder, updates)[WORDS]).max()
  assert moved > 1e-4  # or it tests nothing


@pytest.mark.parametrize(
  "span, updates, changes",
  [
    (20, 8, dict(xla="layers")),  # a mean of four samples
    (3, 9, dict(optimizer={"optimizer": "muon"})),  # exponential
    (3, 9, dict(optimizer={"spike_deviations": 0.01})),
    pytest.param(3, 8, dict(xla="step"), marks=pytest.mark.slow),
    (3, 8, dict(stages=(STAGE, STAGE), num_train_steps=100_000)),
  ],
  ids=str,
)
def test_equals_numpy(tiny_run, tmp_path, monkeypatch, span, updates, changes):
  monkeypatch.setattr(spikes, "_RECENT", 3)
  monkeypatch.setattr(spikes, "_LEAST_DEVIATION", 1e-6)
  settings = {**KEPT, "num_train_steps": updates, **changes}
  runs.pretrain(tiny_run, tmp_path / "run", average_updates=span, **settings)
  has_skipped = any(runs.metrics(tmp_path / "run", "skipped"))
  assert has_skipped == ("spike_deviations" in str(changes))
  assert_averaged(tmp_path / "run", span, updates)


def test_a_stopped_run_is_the_same(tiny_run, tmp_path):
  """To the bit, also stopped in an evaluation of the average."""
  resuming.compare(
    tiny_run, tmp_path,
    [resuming.killed_after(7), resuming.signalled_at(2, "evaluation_vote")],
    num_train_steps=12, save_checkpoints_steps=5, average_updates=30,
    evaluate_average=True, do_eval=True, eval_every_steps=4,
  )  # fmt: skip


def test_each_evaluation_has_a_sample_of_its_own(tiny_run, tmp_path):
  """Of a tenth of 300 updates it would be none: the weights at the start."""
  settings = dict(average_updates=300, evaluate_average=True, do_eval=True)
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=6, eval_every_steps=2, **settings,
    **KEPT,
  )  # fmt: skip
  assert_averaged(tmp_path, 300, 6, every=2)
  reports = metrics.read_jsonl(tmp_path / "eval_metrics.jsonl")
  losses = [report["masked_lm_loss"] for report in reports]
  assert len(losses) == len(set(losses)) == 4


def test_a_short_stage_has_a_sample_of_its_own(tiny_run, tmp_path):
  """Rarer evaluations do not hide it."""
  second = stages.read_item({"num_train_steps": 2}, "a stage")
  runs.pretrain(
    tiny_run, tmp_path, stages=(STAGE, second), num_train_steps=100_000,
    average_updates=100, evaluate_average=True, do_eval=True,
    eval_every_steps=50, **KEPT,
  )  # fmt: skip
  for step in (4, 6):
    samples = read(f"{tmp_path}/model.ckpt-{step}")["averages/samples"]
    assert samples == pytest.approx(step / 10)


def test_denser_samples_are_not_forgotten_faster(tiny_run, tmp_path):
  """One counts for as many updates as are between it and the one before."""
  settings = dict(average_updates=20, num_warmup_steps=0, **KEPT)
  runs.pretrain(tiny_run, tmp_path, num_train_steps=8, **settings)
  settings |= dict(do_eval=True, eval_every_steps=1)
  runs.pretrain(tiny_run, tmp_path, num_train_steps=9, **settings)
  assert read(f"{tmp_path}/model.ckpt-9")["averages/samples"] == 4.5
  before = values(tmp_path, 8, "/average")
  for name, weight in values(tmp_path, 9).items():
    want = before[name] + (weight - before[name]) / 9
    average = values(tmp_path, 9, "/average")[name]
    np.testing.assert_allclose(average, want, rtol=1e-5, atol=1e-6)


def test_a_run_without_averages_has_none_to_evaluate(tiny_run, tmp_path):
  runs.pretrain(tiny_run, tmp_path, num_train_steps=1, num_warmup_steps=0)
  settings = dict(average_updates=4, evaluate_average=True, do_eval=True)
  with pytest.raises(CheckpointError, match="1: it has no average of weights"):
    runs.pretrain(tiny_run, tmp_path, do_train=False, **settings)


def test_turned_on_and_off(tiny_run, tmp_path):
  """An average begins with the weights, and changes nothing but itself."""
  averaging = dict(average_updates=20, do_eval=True, eval_every_steps=100)
  _, parts = resuming.compare(
    tiny_run, tmp_path, [resuming.killed_after(3, average_updates=20)],
    num_train_steps=4, **KEPT,
  )  # fmt: skip
  counts = [len(values(parts, step, "/average")) for step in (2, 4)]
  assert counts == [len(values(parts, 2)), 0]
  runs.pretrain(tiny_run, parts, num_train_steps=5, **averaging, **KEPT)
  runs.assert_equal(values(parts, 5, "/average"), values(parts, 5))
  runs.pretrain(tiny_run, parts, num_train_steps=13, **averaging, **KEPT)
  assert_averaged(parts, 20, 13, first=5)


def test_a_command_that_does_not_train_has_the_average_too(tiny_run, tmp_path):
  """By which the run chose its best checkpoint; unless a flag says others."""
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=2, num_warmup_steps=0,
    average_updates=20, evaluate_average=True, do_eval=True,
  )  # fmt: skip

  def flags(**given):
    values = command_line(
      PretrainingConfig, input_file=tiny_run[1], output_dir=str(tmp_path),
      do_eval=True, max_seq_length=32, max_predictions_per_seq=5, **given,
    )  # fmt: skip
    read = PretrainingConfig.read_flags(values)
    config, _ = run_settings.configured(PretrainingConfig, *read)
    return config.average_updates, config.evaluate_average

  assert flags() == (20, True)
  assert flags(evaluate_average=False) == (20, False)
  assert flags(do_train=True) == (0, False)
  # A start that was killed has saved nothing by its flags.
  with runs.ended_after(2):
    runs.pretrain(tiny_run, tmp_path, num_train_steps=4, num_warmup_steps=0)
  assert flags() == (20, True)


def test_it_is_evaluated_and_exported(tiny_run, tmp_path):
  """While training, alone and in what is written; training stays as it is."""
  folder, plain = tmp_path / "run", tmp_path / "plain"
  settings = dict(num_train_steps=8, do_eval=True, **KEPT)
  averaging = dict(average_updates=20, evaluate_average=True)
  runs.pretrain(tiny_run, plain, **settings)
  runs.pretrain(tiny_run, folder, eval_every_steps=4, **averaging, **settings)
  runs.assert_equal(values(folder, 8), values(plain, 8))
  kept, other = (
    runs.read_json(f, "eval_results.json") for f in (folder, plain)
  )
  assert abs(kept["masked_lm_loss"] - other["masked_lm_loss"]) > 1e-3
  for flags, want in ((averaging, kept), ({}, other)):
    alone = dict(do_train=False, do_eval=True, **flags)
    assert runs.pretrain(tiny_run, folder, **alone)["evaluation"] == want
    assert want.get("evaluated_weights") == ("average" if flags else None)
  text = convert(folder, tmp_path / "tf/it", average=True, to="tensorflow")
  assert ", of each the average of weights" in text.splitlines()[0]
  convert(folder, tmp_path / "hf", average=True)
  convert(tmp_path / "hf", tmp_path / "again/it")
  for written in ("tf/it", "again/it"):
    runs.assert_equal(read(tmp_path / written), values(folder, 8, "/average"))
  convert(folder, tmp_path / "weights")
  for name, says in (("hf", True), ("weights", False)):
    card = (tmp_path / name / "README.md").read_text()
    assert ("| average of the weights over updates | 20 |" in card) == says
    assert (f"| {kept['masked_lm_loss']:.5g} |" in card) == says
  refused(plain, tmp_path / "x", "had no --average_updates", average=True)
  words = "write the mean or the average with"
  refused(folder, tmp_path / "x", words, average=True, to="saved_model")


def test_best_is_chosen_among_evaluations_of_one_kind(
  tiny_run, tmp_path, capfd
):
  """The weights' were better, and count no more."""
  settings = dict(do_eval=True, eval_every_steps=2, average_updates=9, **KEPT)
  runs.pretrain(tiny_run, tmp_path, num_train_steps=6, **settings)
  path = tmp_path / metrics.EVAL_METRICS_FILE
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  lines[-1]["masked_lm_loss"] = 0.0
  path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  best = lambda step: metrics.best_evaluation(
    str(tmp_path), step, metrics.BEST_BY
  )
  assert best(99) == 6
  runs.pretrain(
    tiny_run, tmp_path, num_train_steps=10, evaluate_average=True, **settings
  )
  assert best(6) == 6 and best(99) in (8, 10)
  assert "of other records or weights" in capfd.readouterr().err
  assert "convert_checkpoint.py --average" in convert(tmp_path, tmp_path / "hf")


def test_a_fine_tuning_ends_with_the_best_average(tmp_path, letters):
  """The rate rises until the end: it learns, then it falls apart."""
  make = maker("classify", tmp_path, letters)
  task = make(
    tmp_path / "out", do_eval=True, do_predict=True, eval_every_steps=5,
    num_train_epochs=25.0, warmup_proportion=1.0, learning_rate=0.1,
    average_updates=4, evaluate_average=True,
  )  # fmt: skip
  ended = run(task)["evaluation"]
  logged = metrics.evaluations(str(tmp_path / "out"))
  best = max(logged, key=lambda results: results["accuracy"])
  assert logged[-1]["accuracy"] < best["accuracy"]  # or it tests nothing
  assert ended["global_step"] == best["global_step"]
  predictions = tmp_path / "out" / classification.PREDICTIONS_FILE
  predicted = predictions.read_text()
  predictions.unlink()
  again = make(
    tmp_path / "out", do_train=False, do_eval=True, do_predict=True,
    average_updates=4, evaluate_average=True,
  )  # fmt: skip
  alone = run(again)["evaluation"]
  assert alone["loss"] == pytest.approx(best["loss"], rel=1e-5)
  assert alone["evaluated_weights"] == "average"
  assert predictions.read_text() == predicted
