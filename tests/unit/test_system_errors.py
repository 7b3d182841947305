"""What the system says, as one line: file, reason and what to do."""

import contextlib
import functools
import os
import shlex
import subprocess
import sys

import numpy as np
import pytest
import runs
import samples
import trained

import convert_checkpoint
from checkpoints import checkpoint_files, run_folder
from common import errors, json_files
from common.tensorflow_v1 import tf
from config import bert_config
from text_encoders.wordpiece import WordPieceEncoder
from tools import plot_metrics, prepare_corpus, train_tokenizer
from training import evaluation


@contextlib.contextmanager
def mounted(source, folder, *how):
  """A block in which `source` is mounted at `folder`."""
  mount = ["mount", *how, str(source), str(folder)]
  done = subprocess.run(mount, capture_output=True, text=True)
  if done.returncode:
    pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
  try:
    yield
  finally:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def full_disk(folder):
  """A block in which `folder` is a real disk of 16 kB."""
  return mounted("tmpfs", folder, "-t", "tmpfs", "-o", "size=16k")


DISKS = {
  "No space left on device: make room there": full_disk,
  "File too large: allow larger files there (ulimit -f)": (
    lambda folder: runs.small_files(2000)
  ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, letters):
  """What the commands read, made before the disk is full."""
  path = tmp_path_factory.mktemp("inputs")
  samples.write_documents(path / "text.txt", 300)
  samples.write_records(path / "a.tfrecord", 60)
  samples.write_config(path / "config.json", num_hidden_layers=1)
  trained.write_model(path / "model", "pretraining", letters)
  (path / "run").mkdir()
  for step in range(1, 9):
    report = {"global_step": step, "loss": 1.0 / step}
    json_files.append_line(f"{path}/run/metrics.jsonl", report)
  return path, letters


def make_records(inputs, folder):
  path, vocabulary = inputs
  samples.create(folder, f"{path}/text.txt", vocabulary)


def make_corpus(inputs, folder):
  settings = dict(corpus=f"{inputs[0]}/text.txt", output_dir=f"{folder}/c")
  prepare_corpus.prepare(prepare_corpus.CorpusSettings(**settings))


def make_tokenizer(inputs, folder):
  lines = [(inputs[0] / "text.txt").read_text()]
  train_tokenizer.train_sentencepiece(lines, f"{folder}/m.model", 60)


def convert(to, inputs, folder):
  settings = convert_checkpoint.ConversionSettings(output=f"{folder}/o", to=to)
  convert_checkpoint.convert(settings, f"{inputs[0]}/model")


def draw(form, inputs, folder):
  plot_metrics.plot([f"{inputs[0]}/run"], f"{folder}/curve.{form}")


def train(inputs, folder):
  settings = dict(num_train_steps=2, num_warmup_steps=1, train_batch_size=8)
  settings |= dict(global_batch_size=8)
  try:
    files = f"{inputs[0]}/config.json", f"{inputs[0]}/a.tfrecord"
    runs.pretrain(files, f"{folder}/run", **settings)
  except tf.errors.OpError as e:  # as the command says it
    raise evaluation.clear_error(e) from e


def copy_large(inputs, folder):
  encoder = WordPieceEncoder(inputs[1], True)
  encoder.file = f"{inputs[0]}/text.txt"
  run_folder.write_task(str(folder), {}, encoder)


COMMANDS = {
  "create_pretraining_data": make_records, "prepare_corpus": make_corpus,
  "train_tokenizer": make_tokenizer,
  "run_pretraining": train, "a copy, not its original": copy_large,
}  # fmt: skip
for form in ("huggingface", "tensorflow", "saved_model"):
  COMMANDS[f"convert to {form}"] = functools.partial(convert, form)
for form in ("png", "html"):
  COMMANDS[f"plot_metrics {form}"] = functools.partial(draw, form)


@pytest.mark.parametrize("said", DISKS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_told_with_file_reason_and_remedy(
  inputs, tmp_path, said, name
):
  folder = tmp_path / "disk"
  folder.mkdir()
  with DISKS[said](folder), pytest.raises(Exception) as raised:
    COMMANDS[name](inputs, folder)
  error = raised.value
  assert isinstance(error, errors.UserError | OSError) or errors.remedy(error)
  line = errors.reason(error)
  assert "\n" not in line and "Hint" not in line and "batch_size" not in line
  reason, remedy = said.split(": ")
  assert f"{folder}/" in line and reason in line and remedy in line


@pytest.mark.parametrize(
  "kind, said, memory",
  [
    ("ResourceExhausted", "/a; No space left on", 1),
    ("ResourceExhausted", f"/a; {os.strerror(28)}\nHint: If you want to", 0),
    ("Unknown", f"/a; {os.strerror(122)}", 0),
    ("ResourceExhausted", "OOM when allocating", 1),
  ],
)
def test_a_disk_is_no_memory(kind, said, memory):
  error = getattr(tf.errors, f"{kind}Error")(None, None, said)
  assert evaluation.is_out_of_memory(error) == memory
  told = str(evaluation.clear_error(error))
  assert ("--train_batch_size" in told) == memory
  assert ("make room there" in errors.reason(error)) != memory


def test_the_reason_is_without_the_place_in_the_graph():
  said = (
    "Graph execution error:\n\nDetected at node 'SaveV2' defined at:\n"
    "  File \"a.py\", line 1\nNode: 'SaveV2'\n/d/x; Permission denied\n"
    "\t [[{{node SaveV2}}]]\nHint: If you want"
  )
  error = tf.errors.PermissionDeniedError(None, None, said)
  assert errors.reason(error).startswith("/d/x; Permission denied: name an")
  assert errors.reason(MemoryError()) == "MemoryError()"


# Commands without TensorFlow's start: what `run_main` makes of the error.
NAME = r"caf\udce9"
RAISED = {
  "OSError(28, 'No space left on device', '/d/x')": "/d/x: No space left",
  "OSError(122, 'Disk quota exceeded', '/d/x')": "/d/x: Disk quota exceeded",
  "OSError(30, 'Read-only file system', '/d/x')": "/d/x: Read-only file",
  "RuntimeError('/d/x; No space left on device')": "/d/x; No space left",
  f"RuntimeError('a{NAME}'.encode())": f"a{NAME}: names must be UTF-8: rename",
  f"RuntimeError('--a\\n--b={NAME}\\n--c'.encode())": f"error: --b={NAME}: ",
  "KeyError('a bug')": "Traceback",
}


def command(body, redirect="", encoding="utf-8"):
  code = f"from common import errors\ndef main(_):\n  {body}\n"
  code += "errors.run_main(main)"
  line = shlex.join([sys.executable, "-c", code]) + redirect
  environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
  return subprocess.run(
    line, shell=True, capture_output=True, cwd=runs.ROOT, env=environment
  )


@pytest.mark.parametrize("error", RAISED)
def test_a_command_ends_in_a_line(error):
  done = command(f"raise {error}")
  said = done.stderr.decode()
  assert done.returncode == 1 and RAISED[error] in said
  is_bug = RAISED[error] == "Traceback"
  assert ("Traceback" in said) == is_bug and (said.count("\n") == 1) != is_bug


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_text_is_shown_in_any_encoding(encoding):
  """By both ways of saying it."""
  text = "caf\u00e9 \u65e5\u672c \udce9"
  done = command(f"print({text!r}), errors.tell({text!r})", encoding=encoding)
  shown = text.encode(encoding, "backslashreplace")
  assert done.returncode == 0
  assert shown in done.stdout and shown in done.stderr


@pytest.mark.parametrize("size", [1, 100_000])
def test_standard_output_that_takes_nothing(size):
  closed = command(f"print('a' * {size})", " >&-")
  assert closed.returncode == 0 and not closed.stderr
  full = command(f"print('a' * {size})", " >/dev/full")
  assert full.returncode == 1
  said = b"standard output: No space left on device: make room there\n"
  assert full.stderr.endswith(said) and full.stderr.count(b"\n") == 1


def test_names_that_tensorflow_cannot_read_are_told(tmp_path):
  """A config may have any."""
  prefix = f"{tmp_path}/caf\udce9"
  with pytest.raises(errors.UserError, match="names must be UTF-8") as error:
    checkpoint_files.Checkpoint(prefix)
  assert prefix in str(error.value)
  with pytest.raises(errors.UserError, match="names must be UTF-8"):
    checkpoint_files.write_weights(prefix, {"a": np.zeros(1)})
  path = samples.write_config(tmp_path / "caf\udce9")
  assert bert_config.BertConfig.from_json_file(path).hidden_size > 0


def test_an_html_page_has_the_picture(inputs, tmp_path):
  draw("html", inputs, tmp_path)
  page = (tmp_path / "curve.html").read_text()
  assert page.startswith("<!DOCTYPE html>") and page.count("<svg") == 1
  assert "<?xml" not in page and page.count("</svg>") == 1


def test_a_folder_that_may_not_be_written_is_evaluated(
  tiny_run, tmp_path, capsys
):
  """Nothing locks it, and its results are shown; to train there is an error."""
  folder, closed = tmp_path / "run", tmp_path / "closed"
  closed.mkdir()
  runs.pretrain(tiny_run, folder, num_train_steps=4)
  files = sorted(os.listdir(folder))
  alone = dict(do_train=False, do_eval=True)
  with mounted(folder, closed, "-o", "bind,ro"):
    found = runs.pretrain(tiny_run, closed, **alone)["evaluation"]
    assert f"only shown: {closed} may not be written" in capsys.readouterr().err
    with pytest.raises(OSError, match=r"Read-only.*run\.lock"):
      runs.pretrain(tiny_run, closed, num_train_steps=8)
  assert sorted(os.listdir(folder)) == files
  assert runs.pretrain(tiny_run, folder, **alone)["evaluation"] == found
  assert "eval_results.json" in os.listdir(folder)
