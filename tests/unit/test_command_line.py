"""Flags that are wrong: told at once, in one style, with a remedy."""

import pathlib
import re

import pytest
import runs
from absl import flags
from test_docs import known_flags
from test_settings import Outer, answer, parsed

from common import command_line

TRAIN = "--do_train --output_dir=out --bert_config_file=tiny"
FINETUNE = (
  "--do_train --output_dir=out --bert_config_file=configs/bert_tiny.json "
  "--train_file=nowhere.json"
)
TASK = (
  f"{FINETUNE.replace('configs/bert_tiny.json', 'tiny')} "
  "--vocab_file=FOLDER/vocab.txt --train_file=FOLDER/t"
)
VOCAB = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n"
# A word that is no flag is such as a shell makes of an unquoted glob.
WRONG = [
  ("run_pretraining.py a.tfrecord", "1 arguments that are not flags (a.tfrec"),
  ("run_pretraining.py --learning_rat=1", "there is no --learning_rat; did"),
  (f"run_pretraining.py {TRAIN} --input_file=nowhere", "nowhere: no such file"),
  (
    "run_pretraining.py --do_train --bert_config_file=nowhere",
    "--bert_config_file: nowhere: No such file or directory; or a preset: ba",
  ),
  (
    f"run_pretraining.py {TRAIN} --config_json=nowhere",
    "--config_json=nowhere: [Errno 2] No such file or directory: 'nowhere'\n",
  ),
  ("run_classifier.py --num_train_epochs=a", "--num_train_epochs=a: must be a"),
  (f"run_ner.py {FINETUNE}", "nowhere.json: No such file or directory"),
  (
    f"run_classifier.py {TASK}.tsv --label_column=b",
    "FOLDER/t.tsv: line 2 has no 'b'; its columns are sentence, label: correct "
    "it, or name another column by --label_column\n",
  ),
  (f"run_classifier.py {TASK}.tsv", "FOLDER/t.tsv: its 2 examples are fewer"),
  (f"run_ner.py {TASK}.tsv --word_column=3", "FOLDER/t.tsv: line 1: the num"),
  (f"run_squad.py {TASK}.tsv", "FOLDER/t.tsv: not readable as SQuAD's format"),
  ("predict.py nowhere x", "nowhere: no such model"),
  ("convert_checkpoint.py nowhere", "--output is missing; see --help"),
  ("convert_checkpoint.py nowhere --output=tests", "--output=tests already"),
  ("-m tools.evaluate_grammar x --pairs=nowhere", "nowhere: no such file"),
  (
    "-m tools.run_tasks x --output_dir=out --tasks=nowhere",
    "nowhere: No such file",
  ),
]


@pytest.mark.parametrize("command, words", WRONG)
def test_flags_and_files_are_checked_before_tensorflow(
  tmp_path, command, words
):
  (tmp_path / "vocab.txt").write_text(VOCAB)
  (tmp_path / "t.tsv").write_text("sentence\tlabel\na\ta\nb\tb\n")
  command = command.replace("FOLDER", str(tmp_path))
  words = words.replace("FOLDER", str(tmp_path))
  script = re.sub(r"^-m tools\.(\w+)", r"\1.py", command).split()[0]
  done = answer(tmp_path, "raise SystemExit('loaded')", *command.split())
  assert done.returncode == 1 and not done.stdout
  said = done.stderr
  assert said.startswith(f"{script}: error: {words}") and said.count("\n") == 1


@pytest.mark.parametrize(
  "words, said",
  [
    (["--coutn=2"], "there is no --coutn; did you mean --count?"),
    (["--count=1.5"], "--count=1.5: must be an integer; see --help"),
    (["--speed=a: b"], "--speed=a: b: must be a number; see --help"),
    (["--count"], "Missing value for flag --count; see --help"),
    (["--flagfile=run.json"], "run.json is JSON: a flag file has one a"),
    (["--flagfile=no"], "Unable to open flagfile: [Errno 2] No such file or "
     "directory: 'no'; see --help"),
    (["--fast=maybe"], "--fast=maybe: must be true or false; see --help"),
    (["--warmup-updates=9"], "there is no --warmup-updates; docs/coming_from.md"
     " has in its place: --num_warmup_steps, with --global_batch_size ("),
  ],
)  # fmt: skip
def test_absls_errors_in_our_words(monkeypatch, capsys, words, said):
  values = parsed(Outer, "--size_file=x")
  flags.DEFINE_bool("fast", False, "", values)
  flags.DEFINE_string("flagfile", "", "", values)
  monkeypatch.setattr(flags, "FLAGS", values)
  with pytest.raises(SystemExit):
    command_line.read(["folder/command.py", *words])
  line = capsys.readouterr().err
  assert line.startswith(f"command.py: error: {said}")
  assert line.count("\n") == 1 and "absl" not in line


# Of google/bert, NVIDIA's, run_mlm and fairseq.
THEIRS = (
  "use_tpu", "amp", "optimizer_type", "model_name_or_path",
  "per_device_train_batch_size", "per-device-train-batch-size", "max_steps",
  "warmup_ratio", "mlm_probability", "bf16", "lr_scheduler_type", "adam_beta2",
  "max-update", "max_update", "update-freq", "max-tokens", "tokens-per-sample",
  "mask-prob", "clip-norm", "save-dir", "lr", "adam-betas", "wandb-project",
)  # fmt: skip


def test_flags_of_other_projects_have_an_answer():
  for name in THEIRS:
    said = command_line.replacement_for(name)
    assert said and "](" not in said and "`" not in said, name
  page = pathlib.Path(runs.ROOT, "docs/coming_from.md").read_text()
  names = set()
  for row in re.findall(r"^\| (.*?) \|", page, re.M):
    names |= set(re.findall(r"`--([\w-]+)", row))
  assert len(names) > 150
  without = [name for name in names if not command_line.replacement_for(name)]
  assert not without
  assert not command_line.replacement_for("learning_rat")
  ours = set().union(*known_flags().values())
  assert not ours & set(THEIRS)
