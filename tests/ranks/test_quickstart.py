"""`make pretrain`'s script: own text to the closing screen, on two ranks."""

import itertools
import json
import os
import re

import pytest
import runs

from checkpoints import metrics
from common.errors import UserError
from config import training_plan
from config.bert_config import BertConfig
from records import data_set
from tools import quickstart as script

SENTENCES = [
  f"The {noun} of the {place} {verb} every {time}."
  for noun in ("keeper", "dog", "teacher", "king")
  for place in ("lighthouse", "village", "old mill")
  for verb in ("sings", "sleeps", "walks to the sea")
  for time in ("morning", "winter")
]


def test_own_text_to_a_curve_and_again(tmp_path, capsys):
  text = tmp_path / "text.txt"
  documents = ["\n".join(SENTENCES[i : i + 4]) for i in range(0, 96, 4)]
  text.write_text("\n\n".join(documents * 2))
  folder = tmp_path / "run"
  given = dict(corpus=str(text), output_dir=str(folder), num_train_steps=10)
  words = [f"--{name}={value}" for name, value in given.items()]
  first = runs.launch(["-m", "tools.quickstart", *words])
  assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
  for expected in (
    *("masked LM accuracy", "unigram entropy", "before and after 10 updates"),
    *("all in all", f"{folder}/pretrain/model.ckpt-10", "horovodrun -np 2"),
    *("\n== vocabulary", "   (right: "),
  ):
    assert expected in first.stdout
  assert os.path.exists(folder / "curve.png")
  evaluations = metrics.evaluations(str(folder / "pretrain"))
  assert [e["global_step"] for e in evaluations] == list(range(11))
  for following in ("convert to Hugging Face:", "continue training:"):
    assert first.stdout.count(following) == 1
  shown = screen_of(first.stdout)
  assert max(map(len, shown)) <= 80 + len(str(tmp_path))
  # The second call only asks the run, and ends with the same screen.
  script.main(script.Settings(**given, num_ranks=1))
  second = capsys.readouterr().out
  assert "nothing left to train: update 10 is the last" in second
  assert second.count("\n==") == 1
  same = shown[: shown.index("", 6)]
  assert len(same) > 6 and screen_of(second)[: len(same)] == same


def screen_of(printed):
  """The lines of the closing screen."""
  return printed.partition("\nHeld out: ")[2].splitlines()


def test_another_text_in_the_same_folder_is_an_error(tmp_path):
  """But not where nothing was made yet of what was given before."""
  text, paths = tmp_path / "a.txt", script.Paths(str(tmp_path / "run"))

  def check(corpus=text, **given):
    script.source_of(paths, script.Settings(corpus=str(corpus), **given))

  text.write_bytes("caf\xe9".encode("latin-1"))
  check()
  with pytest.raises(UserError, match="--encoding=nope"):
    check(encoding="nope")
  text.write_text("now in UTF-8: café")
  check()
  source = script.source_of(paths, script.Settings(corpus=str(text)))
  write_json(tmp_path / "run" / "source.json", source)
  check(encoding="UTF8")
  (tmp_path / "b.txt").write_text("b")
  b_text = {"corpus": tmp_path / "b.txt"}
  for other in ({"encoding": "latin-1"}, {"language": "fr"}, b_text):
    with pytest.raises(UserError, match="made from other text") as error:
      check(**other)
    assert "delete" not in str(error.value)


def test_encoding_and_language_reach_what_reads_the_text(tmp_path):
  """Text of another language than English keeps case and accents."""
  with pytest.raises(UserError, match="--language=fr needs --corpus"):
    script.Settings(language="fr")
  documents = [f"Le Café {i} est fermé. Où est-il?" for i in range(40)]
  text = tmp_path / "a.txt"
  text.write_text("\n\n".join(documents), encoding="latin-1")
  paths = script.Paths(str(tmp_path / "run"))
  given = {"encoding": "latin-1", "language": "fr"}
  script.prepare(paths, script.Settings(corpus=str(text), **given))
  manifest = data_set.Manifest.load(paths.manifest("train"))
  assert not manifest.tokenizer.do_lower_case
  with open(paths.vocab, encoding="utf-8") as f:
    assert {"Café", "fermé"} <= {*f.read().split()}


def test_another_model_in_the_folder_of_a_training_is_an_error(tmp_path):
  """Before a training there is no model yet."""
  documents = ["\n".join(SENTENCES[i : i + 4]) for i in range(0, 72, 2)]
  (tmp_path / "a.txt").write_text("\n\n".join(documents))
  paths = script.Paths(str(tmp_path / "run"))
  prepare = lambda model: script.prepare(
    paths, script.Settings(corpus=str(tmp_path / "a.txt"), model=model)
  )
  prepare("bert")
  prepare("modern")
  config = BertConfig.from_json_file(paths.config)
  assert config.differences(BertConfig.from_json_file(script.PRESETS["tiny"]))
  (tmp_path / "run" / "pretrain").mkdir()
  write_json(tmp_path / "run" / "pretrain" / "model.ckpt-1.json", {})
  prepare("modern")
  with pytest.raises(UserError, match="another model, .*: give that MODEL, or"):
    prepare("bert")
  assert not config.differences(BertConfig.from_json_file(paths.config))


def flags_of(command):
  """Flag -> value of a command."""
  return dict(w[2:].split("=", 1) for w in command if "=" in w)


def has_counts(monkeypatch, **counts):
  """All records have these counts in their manifests."""
  monkeypatch.setattr(script.Paths, "counts", lambda *_: counts)


@pytest.mark.parametrize(
  "began, steps", [({"optimizer": "adamw"}, None), (None, 3)], ids=str
)
def test_a_folder_keeps_the_optimizer_that_it_began_with(
  tmp_path, monkeypatch, began, steps
):
  """An earlier release's AdamW, whose moments Muon does not have."""
  has_counts(monkeypatch, examples=10_000)
  paths = script.Paths(str(tmp_path))
  if began:
    start = {"flags": {"optimizer": began}}
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain/run.json").write_text(json.dumps({"runs": [start]}))
  given = flags_of(script.pretraining_command(paths, 2, 2000))
  assert given["optimizer"] == ("adamw" if began else "muon")
  assert int(given.get("muon_steps", 0)) == (steps or 0)


def test_any_number_of_ranks_has_the_same_updates(monkeypatch):
  """So that one folder can be trained on with another NP."""
  names = ("global_batch_size", "train_batch_size", "num_train_steps")
  # Little text is one batch.
  for examples, ranks in itertools.product((60, 10_000), (1, 2, 5, 7, 95, 108)):
    has_counts(monkeypatch, examples=examples)
    given = flags_of(script.pretraining_command(script.Paths("x"), ranks, 2000))
    batch = min(examples, script.GLOBAL_BATCH)
    if ranks > batch:
      continue
    plan = training_plan.resolve(
      ranks=ranks,
      records=10_000,
      num_warmup_steps=0,
      **{name: int(given[name]) for name in names},
    )
    assert plan.records_per_update == batch
    assert (plan.updates, plan.accumulation) == (2000, 1)


def write_json(path, *values):
  path.parent.mkdir(exist_ok=True)
  path.write_text("".join(json.dumps(value) + "\n" for value in values))


def test_the_screen_compares_the_first_and_the_last_evaluation(
  tmp_path, monkeypatch
):
  """And continues from the last, however many updates were asked for."""
  paths, folder = script.Paths(str(tmp_path)), tmp_path / "pretrain"
  has_counts(monkeypatch, examples=9, documents=2, unigram_entropy=5.0)
  results = {"examples": 9, "masked_lm_loss": 0.5, "masked_lm_accuracy": None}
  evaluations = [{**results, "global_step": step} for step in (0, 40)]
  write_json(folder / "eval_metrics.jsonl", *evaluations)
  shown = script.screen(paths, 2, [])
  assert re.search("masked LM accuracy +- +-\n", shown)
  assert "before and after 40 updates" in shown
  assert "--num_train_steps=80" in shown.replace(" \\\n   ", "")


def absent(name):
  """As of a package that is not installed."""
  raise script.importlib.metadata.PackageNotFoundError(name)


def test_ranks_are_as_many_as_gpus_at_most(monkeypatch, tmp_path, capsys):
  """Without Horovod one rank trains, and a line says so if more are asked."""
  monkeypatch.setattr(script.importlib.metadata, "distribution", absent)
  monkeypatch.setattr(script.processes, "HOROVODRUN", __file__)
  for gpus, ranks in ((1, 1), (4, 2), (0, 2)):
    listed = ["NVIDIA H100"] * gpus
    monkeypatch.setattr(script, "visible_gpus", lambda _, names=listed: names)
    assert script.ranks_here(2) == ranks
  monkeypatch.setattr(script.processes, "HOROVODRUN", str(tmp_path / "none"))
  assert script.ranks_here(1) == 1 and not capsys.readouterr().err
  assert script.ranks_here(2) == 1
  assert "make horovod builds it" in capsys.readouterr().err


def test_a_tensorflow_for_cpus_uses_no_gpu(monkeypatch):
  """Whatever nvidia-smi lists."""
  monkeypatch.setattr(script, "visible_gpus", lambda _: ["NVIDIA H100"] * 2)
  monkeypatch.setattr(script.processes, "HOROVODRUN", __file__)
  monkeypatch.setattr(script.importlib.metadata, "distribution", str)
  assert script.ranks_here(3) == 3
  monkeypatch.setattr(script.importlib.metadata, "distribution", absent)
  assert script.ranks_here(3) == 2
