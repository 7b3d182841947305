"""Several tasks and seeds in one command: the table, stops, what may change."""

import json
import shutil
import statistics
from unittest import mock

import finetuning_runs
import pytest
import runs
import tokenizer_folders
import trained

from checkpoints import checkpoint_files
from common import json_files
from common.errors import UserError
from text_encoders import tokenizer_json
from tools import run_tasks

FAST = ["--", "--train_batch_size=16", "--max_seq_length=64", "--xla=off"]


@pytest.fixture
def made(tmp_path, letters):
  """(model, tasks.json with a table and questions)."""
  folder = tmp_path / "a model"
  trained.write_model(folder, "pretraining", letters)
  tasks = {
    "letters": {
      "train_file": finetuning_runs.write_sentences(tmp_path / "a.tsv", 64, 1),
      "eval_file": finetuning_runs.write_sentences(tmp_path / "b.tsv", 20, 2),
      "metrics": "accuracy,f1",
      "num_train_epochs": 2,
    },
    "answers": {
      "script": "run_squad.py",
      "train_file": finetuning_runs.write_questions(tmp_path / "a.json", 8, 1),
      "predict_file": finetuning_runs.write_questions(
        tmp_path / "b.json", 4, 2
      ),
      "num_train_epochs": 1, "max_query_length": 8, "doc_stride": 16,
    },
  }  # fmt: skip
  path = tmp_path / "my tasks.json"
  path.write_text(json.dumps(tasks))
  return folder, path


def launch(made, folder, *words, **how):
  given = [f"--tasks={made[1]}", f"--output_dir={folder}", *words]
  command = ["-m", "tools.run_tasks", str(made[0]), *given, *FAST]
  return runs.launch(command, **how)


@pytest.mark.slow
def test_a_stopped_table_is_completed(tmp_path, made):
  """Stopped in its second run; then a seed more; then other flags."""
  folder = tmp_path / "table"
  results = folder / "results.jsonl"
  second = folder / "letters" / "seed_2" / "metrics.jsonl"
  stopped = launch(made, folder, "--seeds=1,2", stop=second.exists)
  assert stopped.returncode == 75, stopped.stderr[-3000:]
  assert len(json_files.read_lines(results)) == 1
  for seeds in ("1,2", "1,2,3"):
    done = launch(made, folder, f"--seeds={seeds}")
    assert done.returncode == 0, done.stderr[-3000:]
  lines = json_files.read_lines(results)
  names = [(line["task"], line["seed"]) for line in lines]
  assert sorted(names) == sorted(set(names)) and len(names) == 6
  for line in lines:
    at = folder / line["task"] / f"seed_{line['seed']}"
    found = json_files.read(f"{at}/eval_results.json")
    for metric, value in line["metrics"].items():
      assert value == pytest.approx(100 * found[metric])
    assert not list(at.glob("model.ckpt-*"))
  seeds = [line["metrics"]["f1"] for line in lines if line["task"] == "letters"]
  mean, deviation = statistics.mean(seeds), statistics.stdev(seeds)
  row = ["letters", "f1", f"{mean:.2f}", f"{deviation:.2f}", "3"]
  assert row in [line.split() for line in done.stdout.splitlines()]
  for keep in (["--keep_models"], []):  # those that are kept stay
    done = launch(made, folder, "--seeds=1,2,3,4", *keep)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [*(folder / "letters" / "seed_4").glob("model.ckpt-*.index")]
  refused = launch(made, folder, "--num_ranks=2")
  assert refused.returncode == 1
  assert "made with num_ranks 1, not 2" in refused.stderr


@pytest.mark.slow
def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path, made):
  made[1].write_text('{"letters": {"train_file": "nowhere.tsv"}}')
  failed = launch(made, tmp_path / "table")
  assert failed.returncode == 1
  assert "nowhere.tsv" in failed.stderr and "log.txt" in failed.stderr
  assert "Traceback" not in failed.stderr


def test_tables_have_means_over_tasks():
  lines = [
    {"task": task, "seed": seed, "metrics": {"accuracy": value, "f1": 1.0}}
    for task, seed, value in [
      ("a", 1, 50.0), ("a", 2, 60.0), ("b", 1, 70.0), ("b", 2, 90.0)
    ]
  ]  # fmt: skip
  rows = [row.split() for row in run_tasks.table(lines)]
  assert rows[1] == ["a", "accuracy", "55.00", "7.07", "2"]
  assert rows[-1] == "mean of 2 tasks first metrics 67.50 10.61 2".split()
  one = run_tasks.table(lines[:1])
  assert one[1].split() == ["a", "accuracy", "50.00", "1"]
  # Seeds that another task has not would be means of other runs.
  assert "mean of" not in "".join(run_tasks.table(lines[:3]))


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ('{"a": {"script": "rm"}}', "a.script is 'rm', not run_"),
    ('{"../a": {}}', "'../a' cannot be the name of a folder"),
    ('{"a": {"metrics": ["f1"]}}', r"a.metrics is \['f1'\], not text"),
    ("{}", "no task in --glue_dir=.* or --tasks="),
  ],
)
def test_wrong_tasks_are_named(tmp_path, text, message):
  path = tmp_path / "tasks.json"
  path.write_text(text)
  given = run_tasks.Settings(tasks=str(path), output_dir="x")
  with pytest.raises(UserError, match=message):
    run_tasks.read_tasks(given)


def test_the_record_of_runs_replaces_no_file_of_the_user(tmp_path, made):
  tasks = tmp_path / "tasks.json"
  tasks.write_text(made[1].read_text())
  given = run_tasks.Settings(tasks=str(tasks), output_dir=str(tmp_path))
  with pytest.raises(UserError, match="tasks.json is of --tasks, and would be"):
    run_tasks.main(given, str(made[0]))
  assert tasks.read_text() == made[1].read_text()


def test_glues_folders_are_tasks(tmp_path):
  for name in ("CoLA", "MNLI", "notes"):
    (tmp_path / name).mkdir()
  given = run_tasks.Settings(glue_dir=str(tmp_path), output_dir="x")
  tasks = run_tasks.read_tasks(given)
  assert [*tasks] == ["CoLA", "MNLI"]
  assert tasks["CoLA"]["data_dir"] == str(tmp_path / "CoLA")


def test_flags_of_all_runs_are_not_a_tasks(tmp_path):
  """Nor are seeds that are equal, or no numbers."""
  for seeds in ("1,1", "1,01", "a", ""):
    with pytest.raises(UserError, match=f"--seeds={seeds}:"):
      run_tasks.read_seeds(seeds.split(","))
  for task, word, flag in (
    ("x", "--nodo_eval", "do_eval"), ("seed", "--xla=off", "seed"),
  ):  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps({"a": {task: 1}}))
    given = run_tasks.Settings(tasks=f"{tmp_path}/t.json", output_dir="x")
    with pytest.raises(UserError, match=f"--{flag} is set by tools.run_tasks"):
      run_tasks.main(given, "a model", word)


@pytest.mark.parametrize("exact", ["exact_match", "exact"])
def test_squads_results_are_its_versions(tmp_path, monkeypatch, exact):
  """2.0 has another name for one, and more that are left out."""

  def trained(folder, command, each_line):
    results = {"HasAns_f1": 0.1, exact: 0.25, "f1": 0.5}
    json_files.write(f"{folder}/eval_results.json", results)
    best = {"keys": ["f1"], "higher": True}
    json_files.write(f"{folder}/task.json", {"task": "squad", "best_by": best})

  monkeypatch.setattr(run_tasks.processes, "run", trained)
  task = {"script": "run_squad.py", "version_2_with_negative": True}
  found = run_tasks.run(task, 1, 1, str(tmp_path / "run"), [])
  assert found == {"f1": 50.0, exact: 25.0} and next(iter(found)) == "f1"


def test_an_embedders_result_is_what_chose_its_checkpoint(
  tmp_path, monkeypatch
):
  def trained(folder, command, each_line):
    results = {"recall_at_100": 0.5, "ndcg_at_10": 0.25}
    json_files.write(f"{folder}/eval_results.json", results)
    best = {"keys": ["ndcg_at_10"], "higher": True}
    json_files.write(f"{folder}/task.json", {"task": "e", "best_by": best})

  monkeypatch.setattr(run_tasks.processes, "run", trained)
  task = {"script": "run_embedder.py"}
  result = run_tasks.run(task, 1, 1, str(tmp_path / "run"), [])
  assert result == {"ndcg_at_10": 25.0}


def test_each_run_gets_the_parts_of_the_model(tmp_path, made, monkeypatch):
  model, tasks = made
  config = (model / "bert_config.json").rename(tmp_path / "other.json")
  calls = []

  def run(task, seed, ranks, folder, words):
    calls.append(words)
    return {"accuracy": 50.0}

  monkeypatch.setattr(run_tasks, "run", run)
  given = run_tasks.Settings(
    tasks=str(tasks), output_dir=f"{tmp_path}/table", seeds=("1",),
    parts=run_tasks.model_source.Given(bert_config_file=str(config)),
  )  # fmt: skip
  run_tasks.main(given, str(model), "--xla=off")
  run_tasks.main(given, str(model), "--xla=off")
  assert len(calls) == 2
  for call in calls:
    assert call[1:] == [f"--bert_config_file={config}", "--xla=off"]
  with pytest.raises(UserError, match="runs were made with flags .*, not"):
    run_tasks.main(given, str(model), "--xla=step")


def test_runs_keep_the_checkpoint_of_a_run_that_goes_on(
  tmp_path, made, monkeypatch
):
  model, tasks = made
  for path in model.glob("bert_model.ckpt.*"):
    path.rename(str(path).replace("bert_model.ckpt", "model.ckpt-2"))
  files = checkpoint_files.CheckpointFiles(str(model), keep=1)
  weights = checkpoint_files.Checkpoint(files.prefix(2))
  values = {name: weights[name] for name in weights.shapes}
  starts = []

  def run(task, seed, ranks, folder, words):
    if not starts:  # the run removes what was chosen
      files.write(3, values)
      files.wait()
      for path in model.glob("model.ckpt-2.*"):
        path.unlink()
    init = words[0].removeprefix("--init_checkpoint=")
    kept = run_tasks.model_source.find(init)
    assert checkpoint_files.step_of(kept.path) == 2 and kept.tokenizer()
    assert checkpoint_files.Checkpoint(kept.path).shapes == weights.shapes
    starts.append(init)
    return {"accuracy": 50.0}

  monkeypatch.setattr(run_tasks, "run", run)
  for seeds in (("1",), ("1", "2")):
    given = run_tasks.Settings(
      tasks=str(tasks), output_dir=f"{tmp_path}/table", seeds=seeds
    )
    run_tasks.main(given, str(model))
  assert len(starts) == 4 and len(set(starts)) == 1
  shutil.copytree(model, tmp_path / "another")
  with pytest.raises(UserError, match="were made with model .*, not .*another"):
    run_tasks.main(given, f"{tmp_path}/another")


def test_a_kept_model_has_all_files_of_its_tokenizer(tmp_path):
  for name in ("theirs", "kept"):
    (tmp_path / name).mkdir()
  folder = tmp_path / "theirs"
  tokenizer_folders.write(folder, "roberta, vocab.json alone")
  encoder = tokenizer_json.HuggingFaceEncoder(str(folder / "vocab.json"))
  source = mock.Mock(path=str(folder / "none"), folder=str(folder))
  source.tokenizer.return_value = encoder
  run_tasks.keep(source, str(tmp_path / "kept" / "model"))
  again = type(encoder)(str(tmp_path / "kept" / "model" / "vocab.json"))
  assert again.tokens == encoder.tokens and again.special == encoder.special


def test_a_failed_try_does_not_choose_the_model(tmp_path, made, monkeypatch):
  """The copy that it left is not what a try with another model trains."""
  model, tasks = made
  for path in model.glob("bert_model.ckpt.*"):
    path.rename(str(path).replace("bert_model.ckpt", "model.ckpt-2"))
  shutil.copytree(model, tmp_path / "another")
  for path in (tmp_path / "another").glob("model.ckpt-2.*"):
    path.rename(str(path).replace("ckpt-2", "ckpt-3"))
  given = run_tasks.Settings(
    tasks=str(tasks), output_dir=f"{tmp_path}/table", seeds=("1",)
  )
  steps = []

  def run(task, seed, ranks, folder, words):
    init = words[0].removeprefix("--init_checkpoint=")
    steps.append(checkpoint_files.step_of(init))
    if steps == [2]:
      raise UserError("a run failed")
    return {"accuracy": 50.0}

  monkeypatch.setattr(run_tasks, "run", run)
  with pytest.raises(UserError, match="a run failed"):
    run_tasks.main(given, str(model))
  run_tasks.main(given, f"{tmp_path}/another")
  assert steps == [2, 3, 3]


def test_a_folder_keeps_what_its_results_were_made_with(tmp_path):
  """A first try that failed binds nothing, one that would resume does."""
  made_with = {"model's SHA-256": "1", "flags": ""}
  check = lambda made_with, **tasks: run_tasks.record_settings(
    str(tmp_path), made_with, tasks
  )
  check({**made_with, "flags": "--typo"}, x={"f": 0})
  check(made_with, x={"f": 1})
  (tmp_path / "results.jsonl").write_text('{"task": "x", "seed": 1}\n{"ta')
  check(made_with, y={"g": 1})
  check(made_with, y={"g": 2})  # it has no result
  with pytest.raises(UserError, match="with x {'f': 1}, not {'f': 2}"):
    check(made_with, x={"f": 2})
  (tmp_path / "y" / "seed_3").mkdir(parents=True)
  (tmp_path / "y" / "seed_3" / "model.ckpt-5.index").touch()
  with pytest.raises(UserError, match="with y {'g': 2}, not {'g': 3}"):
    check(made_with, y={"g": 3})
  with pytest.raises(UserError, match="with model's SHA-256 1, not 2"):
    check({**made_with, "model's SHA-256": "2"}, y={})


def test_a_line_takes_the_place_of_one_that_was_cut(tmp_path):
  path = tmp_path / "lines.jsonl"
  path.write_text('{"a": 1}\n{"a": ')
  json_files.append_line(str(path), {"a": 2})
  assert json_files.read_lines(str(path)) == [{"a": 1}, {"a": 2}]
  path.write_text("{\n{}\n")
  with pytest.raises(UserError, match=r"lines.jsonl: line 1 does not belong"):
    json_files.read_lines(str(path))
