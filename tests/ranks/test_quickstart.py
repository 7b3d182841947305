"""`make pretrain`'s script: own text to the closing screen, on two ranks."""

import json
import os
import pathlib
import types

import pytest
import runs

from checkpoints import metrics
from common import nvidia
from common.errors import UserError
from config import training_plan
from data import records
from tools import quickstart as script

SENTENCES = [
  f"The {noun} of the {place} {verb} every {time}."
  for noun in ("keeper", "dog", "teacher", "king")
  for place in ("lighthouse", "village", "old mill")
  for verb in ("sings", "sleeps", "walks to the sea")
  for time in ("morning", "winter")
]


def quickstart(folder, text, *flags):
  return runs.launch(
    [
      "-m",
      "tools.quickstart",
      f"--corpus={text}",
      f"--output_dir={folder}",
      "--num_train_steps=10",
      *flags,
    ]
  )


def test_own_text_to_a_curve_and_again(tmp_path):
  text = tmp_path / "text.txt"
  documents = ["\n".join(SENTENCES[i : i + 24]) for i in range(0, 72, 3)]
  text.write_text("\n\n".join(documents * 2))
  folder = tmp_path / "run"
  first = quickstart(folder, text)
  assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
  for expected in (
    "masked LM accuracy",
    "unigram entropy",
    "before and after 11 updates",
    "all in all",
    f"{folder}/pretrain/model.ckpt-11",
    "horovodrun -np 2",
  ):
    assert expected in first.stdout
  assert os.path.exists(folder / "curve.png")
  evaluations = metrics.read_jsonl(
    str(folder / "pretrain" / metrics.EVAL_METRICS_FILE)
  )
  assert [e["global_step"] for e in evaluations] == list(range(12))
  # Of the training's own next steps nothing is shown: the screen has them.
  assert first.stdout.count("convert to Hugging Face:") == 1
  assert first.stdout.count("[MASK]") > 1 and "   (right: " in first.stdout
  assert max(map(len, screen_of(first))) <= 80 + len(str(tmp_path))
  # The second call starts no command, and ends with the same screen.
  second = quickstart(folder, text)
  assert second.returncode == 0, second.stderr[-2000:]
  assert f"{folder}/pretrain: has made all 11 updates" in second.stdout
  assert "left to train; an earlier call\ntrained 11 updates" in second.stdout
  assert "\n== vocabulary" in first.stdout and "\n==" not in second.stdout
  table = screen_of(first).index("")
  assert screen_of(second)[:table] == screen_of(first)[:table]


def screen_of(process):
  """The lines of the closing screen."""
  return process.stdout.partition("\nHeld out: ")[2].splitlines()


def test_a_training_is_done_if_nothing_changed(tmp_path, monkeypatch):
  """Other updates, ranks, records or a config: the ranks start, and check."""
  paths = script.Paths(str(tmp_path))
  flags = script.pretraining_flags(paths, 2, 20)
  bert = {"vocab_size": 99, **script.MODEL}
  write_json(tmp_path / "bert_config.json", bert)
  for path in (paths.train_manifest, paths.heldout_manifest):
    write_json(pathlib.Path(path), {})
  counts = {"examples": 10_000}
  manifest = types.SimpleNamespace(masking="dynamic", counts=counts)
  monkeypatch.setattr(script.records.Manifest, "load", lambda path: manifest)
  folder = tmp_path / "pretrain"
  optimizer = {n: flags[n] for n in ("beta_2", "bias_correction")}
  nested = {*optimizer, "masked_lm_prob"}
  made = {n: v for n, v in flags.items() if n not in nested}
  made |= {"bert": {**bert, "pre_layer_norm": False}, "optimizer": optimizer}
  made["bert_config_file"] = None
  made["masks"] = {"masked_lm_prob": [0.3, 0.15]}
  trained = {"flags": made, "plan": {"ranks": 2, "updates": 19}}
  write_json(folder / "run.json", {"runs": [trained]})
  assert not script.is_trained(paths, flags)  # it did not end
  write_json(folder / "eval_results.json", {"global_step": 19})
  for end in ("index", "json"):
    assert not script.is_trained(paths, flags)
    write_json(folder / f"model.ckpt-19.{end}", {})
  os.utime(paths.train_manifest, (1, 1))
  os.utime(paths.heldout_manifest, (1, 1))
  assert script.is_trained(paths, flags)
  for changed in (
    script.pretraining_flags(paths, 3, 20),
    script.pretraining_flags(paths, 2, 10),
    {**flags, "precision": "fp16"},
    {**flags, "beta_2": 0.9},
  ):
    assert not script.is_trained(paths, changed)
  assert script.steps_to_make(paths, 10) == 20  # as it was continued
  assert script.steps_to_make(paths, 30) == 30
  os.utime(paths.train_manifest)  # made again
  os.utime(folder / "eval_results.json", (2, 2))
  assert not script.is_trained(paths, flags)
  os.utime(paths.train_manifest, (1, 1))
  write_json(tmp_path / "bert_config.json", {**bert, "hidden_size": 64})
  assert not script.is_trained(paths, flags)


def test_another_text_in_the_same_folder_is_an_error(tmp_path):
  """But not where nothing was made yet of what was given before."""
  text, paths = tmp_path / "a.txt", script.Paths(str(tmp_path / "run"))

  def check(corpus=text, **given):
    script.check_source(paths, script.Settings(corpus=str(corpus), **given))

  text.write_bytes("caf\xe9".encode("latin-1"))
  check()
  with pytest.raises(UserError, match="--encoding=nope"):
    check(encoding="nope")
  text.write_text("now in UTF-8: café")
  check()
  os.makedirs(paths.corpus)
  with open(paths.heldout_text, "w"):
    pass
  check(encoding="UTF8")
  (tmp_path / "b.txt").write_text("b")
  for other in (
    {"encoding": "latin-1"},
    {"language": "fr"},
    {"corpus": tmp_path / "b.txt"},
  ):
    with pytest.raises(UserError, match="made from other text") as error:
      check(**other)
    assert "delete" not in str(error.value)
  # As older ones have it, which read English in UTF-8 only.
  source = runs.read_json(paths.root, "source.json")
  del source["encoding"], source["language"]
  write_json(tmp_path / "run" / "source.json", source)
  check()


def test_the_encoding_reaches_what_reads_the_text(tmp_path):
  (tmp_path / "a.txt").write_text("only one document .")
  process = quickstart(tmp_path / "run", tmp_path / "a.txt", "--encoding=ascii")
  assert "--encoding=ascii --language=en" in " ".join(process.stdout.split())
  assert "documents are too few" in process.stdout and process.returncode == 1


def test_text_of_another_language_keeps_case_and_accents(tmp_path):
  with pytest.raises(UserError, match="--language=fr needs --corpus"):
    script.Settings(language="fr")
  documents = [f"Le Café {i} est fermé. Où est-il?" for i in range(40)]
  (tmp_path / "a.txt").write_text("\n\n".join(documents))
  paths = script.Paths(str(tmp_path / "run"))
  given = script.Settings(corpus=f"{tmp_path}/a.txt", language="fr")
  script.prepare(paths, given)
  assert not records.Manifest.load(paths.train_manifest).tokenizer.do_lower_case
  with open(paths.vocab, encoding="utf-8") as f:
    assert {"Café", "fermé"} <= {*f.read().split()}


def test_a_folder_keeps_its_global_batch(tmp_path):
  """Five ranks once had one of 95."""
  run = {"flags": {"global_batch_size": 95}, "plan": {"ranks": 5}}
  write_json(tmp_path / "pretrain" / "run.json", {"runs": [run]})
  make = lambda: script.pretraining_command(script.Paths(str(tmp_path)), 5, 20)
  assert "--global_batch_size=108" in make()  # that run saved nothing
  (tmp_path / "pretrain" / "model.ckpt-20.index").touch()
  assert {"--global_batch_size=95", "--train_batch_size=19"} <= set(make())


def test_little_text_is_one_batch(tmp_path, monkeypatch):
  paths = script.Paths(str(tmp_path))
  write_json(pathlib.Path(paths.train_manifest), {})
  made = types.SimpleNamespace(masking="dynamic", counts={"examples": 60})
  monkeypatch.setattr(script.records.Manifest, "load", lambda path: made)
  flags = script.pretraining_flags(paths, 2, 20)
  assert (flags["global_batch_size"], flags["train_batch_size"]) == (60, 30)


def test_a_folder_of_an_older_version_keeps_its_optimizer(tmp_path):
  new = script.pretraining_flags(script.Paths(str(tmp_path)), 2, 20)
  assert (new["initial_weights"], new["beta_2"]) == ("informed", 0.999)
  run = {"flags": {"optimizer": {"beta_2": 0.98}}, "plan": {"ranks": 2}}
  write_json(tmp_path / "pretrain" / "run.json", {"runs": [run]})
  (tmp_path / "pretrain" / "model.ckpt-20.index").touch()
  old = script.pretraining_flags(script.Paths(str(tmp_path)), 2, 20)
  assert (old["initial_weights"], old["beta_2"]) == ("random", 0.98)


@pytest.mark.parametrize("ranks", [1, 2, 5, 7, 95, 108])
def test_any_number_of_ranks_has_the_same_updates(ranks):
  """So that one folder can be trained on with another NP."""
  command = script.pretraining_command(script.Paths("x"), ranks, 2000)
  given = dict(w[2:].split("=", 1) for w in command if "=" in w)
  names = ("global_batch_size", "train_batch_size", "num_train_steps")
  plan = training_plan.resolve(
    ranks=ranks,
    records=10_000,
    num_warmup_steps=0,
    **{name: int(given[name]) for name in names},
  )
  assert (plan.records_per_update, plan.updates, plan.accumulation) == (
    script.GLOBAL_BATCH,
    2000,
    1,
  )


def write_json(path, *values):
  path.parent.mkdir(exist_ok=True)
  path.write_text("".join(json.dumps(value) + "\n" for value in values))


def test_the_screen_says_what_this_call_did(tmp_path, monkeypatch):
  """After a folder was trained further than it is asked for here."""
  paths, folder = script.Paths(str(tmp_path)), tmp_path / "pretrain"
  losses = ("masked_lm_loss", "masked_lm_accuracy")
  losses += ("next_sentence_loss", "next_sentence_accuracy")
  held_out = {"examples": 9, **dict.fromkeys(losses, 0.5)}
  steps = [{**held_out, "global_step": step} for step in (0, 40)]
  write_json(folder / "eval_metrics.jsonl", *steps)
  counts = dict(examples=9, random_next=3, documents=2, unigram_entropy=5.0)
  monkeypatch.setattr(
    script.records.Manifest,
    "load",
    lambda path: type("Manifest", (), {"counts": counts}),
  )
  shown = script.screen(paths, 2, 10, 0.0, {})
  assert "\nnothing was left to train\n" in shown  # killed before it wrote them
  speeds = ("examples_per_second", "tokens_per_second", "padding")
  speeds += ("steady_examples_per_second", "steady_tokens_per_second")
  results = {"updates": 30, "seconds": 3, **dict.fromkeys(speeds, 0.5)}
  write_json(folder / "training_results.json", results)
  shown = script.screen(paths, 2, 10, 0.0, {**results, "updates": 10})
  assert "    entropy of labels 0.637\n" in shown  # 1/3 and 2/3
  assert "\ntrained 30 updates in 3 s" in shown and "nothing" not in shown
  shown = script.screen(paths, 2, 10, 0.0, results)
  assert "\nnothing was left to train; an earlier call\ntrained 30" in shown
  assert "before and after 40 updates" in shown
  assert "--num_train_steps=80" in shown.replace(
    " \\\n   ", ""
  )  # and not 20, which have been made


def test_ranks_are_as_many_as_gpus_at_most(monkeypatch):
  for gpus, ranks in (([9.0], 1), ([9.0] * 4, 2), ([], 2)):
    monkeypatch.setattr(script, "gpus", lambda found=gpus: found)
    assert script.ranks_here(2) == ranks


def test_a_tensorflow_for_cpus_uses_no_gpu(monkeypatch):
  """Whatever nvidia-smi lists."""
  asked = []
  listed = types.SimpleNamespace(stdout="8.0\n9.0\n")
  monkeypatch.setattr(
    nvidia.subprocess, "run", lambda words, **_: asked.append(words) or listed
  )
  monkeypatch.setattr(script.importlib.metadata, "distribution", str)
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
  assert script.gpus.__wrapped__() == []

  def absent(name):
    raise script.importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(script.importlib.metadata, "distribution", absent)
  assert script.gpus.__wrapped__() == [8.0, 9.0]
  assert not [word for word in asked.pop() if word.startswith("--id")]
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
  script.gpus.__wrapped__()
  assert asked.pop()[-1] == "--id=1,3"
  for hidden in ("", "-1"):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert script.gpus.__wrapped__() == [] and not asked
