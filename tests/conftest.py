"""Fixtures that several test modules share."""

import functools
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading

import pytest
import runs
from samples import (
  LETTERS,
  create,
  settings_of,
  write_config,
  write_documents,
  write_packed,
  write_records,
)


def pytest_configure(config):
  """The folder of `runs.trained`, which all workers share."""
  if not hasattr(config, "workerinput"):
    folder = tempfile.mkdtemp(prefix="trained_runs_")
    os.environ["TRAINED_RUNS"] = folder
    config.add_cleanup(lambda: shutil.rmtree(folder))


@pytest.fixture
def tiny_run(tmp_path):
  """A tiny config and 2 x 60 records: (config path, records glob)."""
  for i in range(2):
    write_records(tmp_path / f"data-{i}.tfrecord", 60, seed=i)
  config = write_config(tmp_path / "config.json", num_hidden_layers=1)
  return config, str(tmp_path / "data-*.tfrecord")


def packed(folder, dynamic):
  """((config path, records glob), global batch size) of packed records."""
  pattern, global_batch = write_packed(folder, dynamic)
  config = write_config(folder / "config.json", num_hidden_layers=1)
  return (config, pattern), global_batch


@pytest.fixture
def packed_run(tmp_path):
  """As tiny_run, packed; and the global batch size."""
  return packed(tmp_path, dynamic=False)


@pytest.fixture
def dynamic_run(tmp_path):
  """As packed_run, with whole-word masks that are drawn on reading."""
  return packed(tmp_path, dynamic=True)


@pytest.fixture(autouse=True)
def reference_variables():
  """Runs switch resource variables on, for good: not for the next test."""
  yield
  if module := sys.modules.get("common.tensorflow_v1"):
    module.tf.disable_resource_variables()


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
  """A vocabulary of letters and digits."""
  path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
  path.write_text("".join(f"{t}\n" for t in LETTERS))
  return str(path)


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory):
  """A tokenizer.json of byte-level BPE, of 280 tokens."""
  from tools import train_tokenizer

  path = str(tmp_path_factory.mktemp("bpe") / "tokenizer.json")
  train_tokenizer.train_bpe(["the cat sat on the mat in paris"] * 9, path, 280)
  return path


@pytest.fixture(scope="session")
def spm_model(tmp_path_factory):
  """A SentencePiece model of 60 pieces, of words and digits."""
  import sentencepiece

  folder = tmp_path_factory.mktemp("spm")
  corpus = folder / "text.txt"
  line = "the cat sat on the mat in paris . good bad w0 w1 w2 345 678 9 , ?\n"
  corpus.write_text(line * 50)
  sentencepiece.SentencePieceTrainer.train(
    input=str(corpus), model_prefix=str(folder / "m"), vocab_size=60,
    pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, pad_piece="[PAD]",
    unk_piece="[UNK]", control_symbols="[CLS],[SEP],[MASK]",
    hard_vocab_limit=False, minloglevel=2,
  )  # fmt: skip
  return str(folder / "m.model")


@pytest.fixture
def texts(tmp_path):
  """60 documents over a plain and a .gz file; returns the pattern."""
  write_documents(tmp_path / "a.txt", 40, seed=1)
  write_documents(tmp_path / "b", 20, seed=2)
  (tmp_path / "b.txt.gz").write_bytes(
    gzip.compress(b"\n" + (tmp_path / "b").read_bytes())
  )
  return f"{tmp_path}/*.txt*"


@pytest.fixture
def settings_for(tmp_path, texts, letters):
  """`settings_of` these texts, but for the keywords given."""
  return functools.partial(
    settings_of, tmp_path, input_file=texts, vocab_file=letters
  )


@pytest.fixture
def make(tmp_path, texts, letters):
  """Makes the records of `settings_for`; returns their summary."""
  return functools.partial(
    create, tmp_path, input_file=texts, vocab_file=letters
  )


@pytest.fixture(scope="session")
def peer(tmp_path_factory):
  """Does jobs of transformers_peer.py; skips where there is no transformers."""
  environment = f"{runs.ROOT}/.build/transformers"
  python = os.environ.get("TRANSFORMERS_PYTHON", f"{environment}/bin/python")
  remedy = (
    f"To make it: python3 -m venv {environment} && {environment}/bin/pip "
    "install -r benchmarks/peers/requirements.txt, or set TRANSFORMERS_PYTHON"
  )
  if not os.path.exists(python):
    pytest.skip(f"NOT COMPARED with transformers: no {python}. {remedy}")
  log = tmp_path_factory.mktemp("peer") / "stderr.txt"
  command = [python, f"{runs.ROOT}/tests/support/transformers_peer.py"]
  with open(log, "w") as errors, subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
    text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
  ) as process:  # fmt: skip
    if process.stdout.readline() != "ready\n":
      process.wait()
      said = log.read_text()
      assert "ModuleNotFoundError" in said, said
      pytest.skip(f"NOT COMPARED: {said[-200:]}. {remedy}")

    def run(jobs):
      hang = threading.Timer(runs.HANG_SECONDS, process.kill)
      hang.start()
      print(json.dumps(jobs), file=process.stdin, flush=True)
      answer = process.stdout.readline()
      hang.cancel()
      assert answer == "done\n", log.read_text()[-3000:]

    yield run
