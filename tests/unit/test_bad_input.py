"""Bad input: refused in one line or read right, whatever it is.

`tests/fuzz` tries many more; what it found has a test here.
"""

import ast
import functools
import math
import os
import time

import finetuning_runs
import numpy as np
import pytest
import runs
import test_architecture
from samples import settings_of, write_config

import tokenization
from benchmarks import measuring
from checkpoints import checkpointing
from checkpoints.checkpoint_files import CheckpointError
from common import json_files
from common.errors import DataError, UserError
from common.tensorflow_v1 import tf
from config import bert_config, deepspeed_json, record_shapes
from config.pretraining import PretrainingConfig
from finetuning import squad
from gradients.distributed import Comm
from model import huggingface_config
from records import creation, data_set
from text_encoders import kinds
from text_encoders.wordpiece import MAX_INPUT_CHARS_PER_WORD
from tools import train_tokenizer

json_flags = functools.partial(deepspeed_json.flags_of, PretrainingConfig)
MODULES = list(test_architecture.MODULES.values())


# No input is ever code --------------------------------------------------------

_CODE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
_CODE_FUNCTIONS = {"eval", "exec", "compile", "__import__"}
# Ranks send each other values, as Horovod itself does: no file comes by there.
_BETWEEN_RANKS = {"gradients/distributed.py": {"pickle"}}


def test_no_module_runs_what_it_reads():
  for path in MODULES:
    module = "/".join(path.parts[-2:])
    banned = _CODE_MODULES - _BETWEEN_RANKS.get(module, set()) | {"yaml"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      names, function, keywords = set(), None, []
      if isinstance(node, ast.Import):
        names = {alias.name.split(".")[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        names = {node.module.split(".")[0]}
      elif isinstance(node, ast.Call):
        function, keywords = getattr(node.func, "id", None), node.keywords
      assert not names & banned, path
      assert function not in _CODE_FUNCTIONS, path
      for keyword in keywords:
        safe = keyword.arg != "allow_pickle" or keyword.value.value is False
        assert safe, path


# JSON -------------------------------------------------------------------------


@pytest.mark.parametrize(
  "text, words",
  [
    (b'{"a": 1, "a": 2}', "'a' occurs twice"),
    (b'{"b": {"a": 1, "a": 1}}', "'a' occurs twice"),
    (b"[NaN]", "NaN is not JSON"), (b"[-Infinity]", "-Infinity is not JSON"),
    (b"[" * 100_000, "nested too deeply"), (b"9" * 5000, "digits"),
    (b'"\xff"', "utf-8"), (b"", "Expecting value"),
  ],
)  # fmt: skip
def test_bad_json_is_refused_wherever_it_stands(tmp_path, text, words):
  """By every reader of JSON, with the file's name."""
  path = tmp_path / "bad.json"
  path.write_bytes(text)
  for read in (
    data_set.Manifest.load,
    json_flags,
    json_files.read,
    bert_config.BertConfig.from_json_file,
  ):
    with pytest.raises(ValueError, match=f"bad.json.*{words}"):
      read(str(path))


def test_a_users_own_file_is_not_called_damaged(tmp_path):
  """Only of files that the project wrote itself."""
  path = tmp_path / "train-v1.1.json"
  path.write_text('{"data": [')
  for read in (
    json_files.read,
    lambda path: squad.read_squad(path, False, True),
    lambda path: huggingface_config.read_config(os.path.dirname(path)),
  ):
    (tmp_path / "config.json").write_text('{"a"')
    with pytest.raises(DataError, match="json: not readable as") as e:
      read(str(path))
    assert "damaged" not in str(e.value) and "remove" not in str(e.value)
  with pytest.raises(DataError, match="v1.1.json: damaged: .*; do this"):
    json_files.read_own(str(path), "do this")


# Vocabularies and models ------------------------------------------------------


@pytest.mark.parametrize(
  "change, words",
  [
    ({"score": math.nan}, "not a SentencePiece model: .* no finite score"),
    ({"piece": "\0"}, "not a SentencePiece model: .*NUL"),  # ended the process
    # Of which the library knows the first only.
    ({"piece": "[PAD]"}, "not a SentencePiece model: a piece is in it twice"),
  ],
  ids=["score", "nul", "twice"],
)
def test_models_with_pieces_that_cannot_be(tmp_path, change, words):
  from sentencepiece import sentencepiece_model_pb2

  path = tmp_path / "m.model"
  train_tokenizer.train_sentencepiece(["some text here"] * 20, str(path), 30)
  model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
  for name, value in change.items():
    setattr(model.pieces[9], name, value)
  path.write_bytes(model.SerializeToString())
  with pytest.raises(DataError, match=f"m.model: {words}"):
    kinds.load_tokenizer(spm_model_file=str(path))


def test_words_that_are_always_unknown_are_neither_trained_on_nor_kept(
  tmp_path, letters
):
  """Merging takes the square of their length: a million letters took hours."""
  path = str(tmp_path / "vocab.txt")
  train_tokenizer.train_wordpiece(["short words", "ab" * 500_000], path, 60)
  assert "a" not in tokenization.load_vocab(path)
  encoder = kinds.load_tokenizer(letters)
  word = "a" * (MAX_INPUT_CHARS_PER_WORD + 1)
  (ids,) = encoder.encode_batch([f"{word[1:]} {word}"])
  assert ids[-1] == encoder.unk_id and len(ids) == len(word)
  assert list(encoder.pieces_of.__self__) == [word[1:]]


def test_accents_without_end():
  """Sorting them, as NFD does, took minutes for a line of a megabyte."""
  marks = "\u0301\u0316" * 250_000
  began = time.monotonic()
  assert tokenization.BasicTokenizer().tokenize(f"e{marks} x") == ["e", "x"]
  assert time.monotonic() - began < 60  # minutes before


# Settings ---------------------------------------------------------------------


@pytest.fixture
def run_of(tmp_path):
  """(flags given) -> PretrainingConfig, of flags of their own."""
  config = write_config(tmp_path / "config.json")
  return lambda **changes: runs.config((config, "x"), tmp_path, **changes)


def test_configs_and_runs_that_cannot_be(tmp_path, run_of):
  """One of each kind of value; the bounds hold for fields of JSON, too."""
  path = write_config(tmp_path / "bert.json", initializer_range=10**400)
  with pytest.raises(ValueError, match="bert.json: initializer_range is 1000"):
    bert_config.BertConfig.from_json_file(path)
  (tmp_path / "ds.json").write_text('{"steps_per_print": 0}')
  for change, words in (
    (json_flags(f"{tmp_path}/ds.json"), "--log_every_steps=0"),
    ({"lr_schedule": "cosine", "lr_power": 2.0}, "--lr_power=2.0 has no mean"),
    ({"init_checkpoint": ""}, "--init_checkpoint is empty"),
    ({"init_checkpoint": "a/b*"}, r"--init_checkpoint=a/b\*: TensorFl"),
    ({"eval_input_file": ""}, "--eval_input_file is empty"),
  ):
    with pytest.raises(UserError, match=words):
      run_of(**change)
  config = run_of(max_seq_length=16, max_predictions_per_seq=17)
  with pytest.raises(UserError, match="--max_predictions_per_seq=17: more"):
    record_shapes.of_patterns(None, config)
  given = finetuning_runs.command_line(
    PretrainingConfig, config_json="", bert_config_file=path
  )
  with pytest.raises(UserError, match="--config_json=: "):
    measuring.config_of(PretrainingConfig, given)


# Text -------------------------------------------------------------------------


@pytest.fixture
def create(tmp_path, letters):
  """(text, changes of the settings) -> the counts of its records."""

  def make(text, **changes):
    (tmp_path / "t.txt").write_bytes(text)
    made = settings_of(tmp_path, f"{tmp_path}/t.*", letters, **changes)
    return creation.create(made).manifest.counts

  return make


def test_a_line_of_10_megabytes(create):
  """In a time that a look back at each word would not take."""
  began = time.monotonic()
  line = (b"a" * 249 + b" ") * (10_000_000 // 250)
  counts = create(
    b"a b. \n\n" + line + b"\n\nc d.\n",
    dynamic_masks=True, max_seq_length=512, dupe_factor=1,
  )  # fmt: skip
  assert counts["documents"] == 3 and counts["tokens"] >= 40_000
  assert time.monotonic() - began < runs.HANG_SECONDS / 10


def test_a_million_empty_lines(create):
  counts = create(b"a b.\n" + b"\n" * 1_000_000 + b"c d.\n")
  assert (counts["documents"], counts["sentences"]) == (2, 2)


@pytest.mark.parametrize("letter", ["a", "中", "\u0301"])
def test_one_enormous_word(create, letter):
  word = letter * (3_000_000 // len(letter.encode()))
  data = f"a b.\n\n{word}\n\nc d.\n".encode()
  counts = create(data)
  assert counts["documents"] >= 2 and counts["text_bytes"] == len(data)


# Checkpoints ------------------------------------------------------------------


@pytest.fixture
def checkpointer(tmp_path):
  """(folder with checkpoint 3, session, Checkpointer)."""
  folder = tmp_path / "run"
  folder.mkdir()
  with tf.Graph().as_default(), tf.Session() as session:
    tf.train.get_or_create_global_step()
    tf.get_variable("bert/kernel", [4, 3])
    made = checkpointing.Checkpointer(str(folder), Comm())
    session.run(tf.global_variables_initializer())
    tf.train.get_global_step().load(3, session)
    made.save(session, 3)
    made.finish()
    yield folder, session, made


@pytest.mark.parametrize(
  "content",
  [b"", b"\xff\xfe", b"noise", b'model_checkpoint_path: "model.ckpt-9"'],
)
def test_a_list_of_checkpoints_that_is_damaged(checkpointer, content):
  """It is an error, not a new run beside the checkpoint of another program."""
  folder, _session, made = checkpointer
  (folder / "checkpoint").write_bytes(content)
  assert made.restore.has_checkpoint()  # by its marker
  os.unlink(folder / "model.ckpt-3.json")
  with pytest.raises(CheckpointError, match="checkpoint: names"):
    made.restore.has_checkpoint()


def test_a_folder_that_was_moved_has_its_checkpoint(checkpointer):
  """Its list names the folder where the checkpoint was written."""
  folder, _session, made = checkpointer
  os.unlink(folder / "model.ckpt-3.json")
  (folder / "checkpoint").write_text(
    'model_checkpoint_path: "/nowhere/model.ckpt-3"'
  )
  assert made.restore.has_checkpoint()
  assert made.files.newest_whole() == str(folder / "model.ckpt-3")


def test_a_file_of_a_checkpoint_is_not_its_name(checkpointer):
  folder, session, made = checkpointer
  for name in ("", "nowhere", "model.ckpt-*", "model.ckpt"):
    with pytest.raises(CheckpointError, match="no readable checkpoint"):
      made.restore.initialise(session, str(folder / name))


def test_weights_that_are_not_finite(checkpointer):
  folder, session, made = checkpointer
  (kernel,) = tf.trainable_variables()
  kernel.load(np.full([4, 3], np.nan), session)
  made.save(session, 4)
  made.finish()
  words = "ckpt-4: bert/kernel holds values that are not finite"
  with pytest.raises(CheckpointError, match=words):
    made.restore.resume(session)
  with pytest.raises(CheckpointError, match=words):
    made.restore.initialise(session, str(folder / "model.ckpt-4"))
