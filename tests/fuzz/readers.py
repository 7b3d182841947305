"""What is damaged, how it is read, and what would be right."""

import contextlib
import gzip
import io
import json
import math
import os
import pathlib
import shutil
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import safetensors.numpy
from backports import zstd
from hypothesis import strategies as st

import mixed_precision
from benchmarks import measuring
from common import json_files, settings
from config import record_shapes, training_plan
from config.pretraining import PretrainingConfig
from corpus import text_files
from records import (
  creation,
  data_set,
  record_files,
  record_report,
  record_shape,
)
from records.tfrecord import INDEX_SUFFIX, RecordSet, shard_writer, verify_file
from tests.fuzz import damage
from tests.fuzz.damage import damaged, damaged_json
from tests.support.samples import (
  NO_DROPOUT,
  TINY,
  encode_example,
  feature_values,
  flag_values,
  parsed,
  write_packed,
)
from text_encoders import kinds
from text_encoders.base import SPECIAL_TOKENS
from tools import prepare_corpus, train_tokenizer
from workers import launchers


class Reader(NamedTuple):
  """A reader of the project.

  Attributes:
    given: strategy of its inputs.
    read: reads one, or refuses it with an error for the user.
    names: the error names one of these.
    right: (input, what was read) -> whether it is what the input says.
  """

  given: st.SearchStrategy
  read: Callable
  names: tuple
  right: Callable = lambda given, got: True


READERS = {}  # name -> (how to make it in an empty folder, share of all inputs)


def reader(share):
  def add(make):
    READERS[make.__name__] = make, share
    return make

  return add


def put(path, data: bytes | None) -> str:
  """Writes a file, or makes a folder of its name if `data` is None."""
  if path.is_dir():
    path.rmdir()
  if data is None:
    path.unlink(missing_ok=True)
    path.mkdir()
  else:
    path.write_bytes(data)
  return str(path)


def of_file(path, given, load, right=lambda data, got: True):
  """A reader of one file; one time in thirty there is a folder in its place."""
  given = st.one_of(*[given] * 30, st.none())
  read = lambda data: load(put(path, data))
  is_right = lambda data, got: data is not None and right(data, got)
  # A tokenizer.json is read as a vocab.txt in a folder of its name.
  names = str(path), f"{os.path.basename(path)}-"
  return Reader(given, read, names, is_right)


def is_json(data, _):
  """Whether a text is JSON to the letter of the standard."""
  with contextlib.suppress(ValueError):
    damage.strict_json(data)
    return True


# Records ----------------------------------------------------------------------


def record_file(folder):
  """Records, and the path of their file."""
  rng, path = np.random.default_rng(0), folder / "x.tfrecord"
  made = [rng.bytes(int(n)) for n in rng.integers(0, 200, 12)]
  with shard_writer(str(path)) as writer:
    for record in made:
      writer.write(record)
  return made, path


@reader(1.5)
def framing(folder):
  """Record files, with an index and without."""
  made, path = record_file(folder)
  whole, index = path.read_bytes(), folder / f"x.tfrecord{INDEX_SUFFIX}"
  saved = index.read_bytes()

  def resized(number, length):  # under a checksum of its own
    start = sum(16 + len(record) for record in made[:number])
    head = length + damage.masked_crc(length)
    return whole[:start] + head + whole[start + 12 :]

  def read(given):
    data, has_index = given
    put(path, data)
    index.unlink(missing_ok=True)
    if has_index:
      put(index, saved)
    got = list(RecordSet([str(path)]))
    verify_file(str(path))
    return got

  lengths = st.sampled_from(damage.HUGE)
  lengths |= st.integers(0, 300).map(lambda n: struct.pack("<Q", n))
  other = b"".join(damage.frame(record[::-1]) for record in made)
  data = damaged(whole, other) | st.builds(resized, st.integers(0, 11), lengths)
  right = lambda given, got: got and got == damage.unframed(given[0])
  return Reader(st.tuples(data, st.booleans()), read, (str(path),), right)


@reader(1.5)
def index(folder):
  """Indexes of whole record files."""
  made, path = record_file(folder)
  index = folder / f"x.tfrecord{INDEX_SUFFIX}"
  saved, offsets = index.read_bytes(), np.load(index)

  def changed(place, value):
    array, out = offsets.copy(), io.BytesIO()
    array[place] = value
    np.save(out, array)
    return out.getvalue()

  shapes = [b"(-1,)", b"(9,9)", b"(1<9)", b"[13,]", b"((((("]
  others = [saved.replace(b"(13,)", shape) for shape in shapes]
  size, top = int(offsets[-1]), np.iinfo(np.int64).max
  values = st.sampled_from([-1, size + 1, top, -top]) | st.integers(0, size)
  given = damaged(saved) | st.sampled_from(others)
  given |= st.builds(changed, st.integers(0, len(offsets) - 1), values)
  load = lambda _: list(RecordSet([str(path)]))
  right = lambda _, got: got == made
  return of_file(index, given, load, right)._replace(names=(str(path),))


@st.composite
def odd_record(draw):
  """(shape, record, one that is damaged or has a feature of other values)."""
  e, vocab_size = draw(st.tuples(*map(st.sampled_from, ([1, 3], [30, 300]))))
  dynamic, two = draw(st.booleans()), []
  for seed in (0, 1):
    rng = np.random.default_rng(seed)
    features = data_set.fake_features(rng, 16, 4, vocab_size, e)
    if dynamic:
      for name in ("positions", "ids", "weights"):
        del features[f"masked_lm_{name}"]
      features["is_continuation"] = rng.integers(0, 2, 16)
    two.append(features)
  encoded, other = map(encode_example, two)
  if draw(st.booleans()):
    return (e, vocab_size, dynamic), encoded, draw(damaged(encoded, other))
  name = draw(st.sampled_from(sorted(features)))
  values = features[name].tolist()
  numbers = [0, 1, 3, 16, 300, 2**63 - 1]
  if features[name].dtype.kind == "f" or draw(st.booleans()):
    numbers = [math.nan, math.inf, -0.5, 0.0, 1.0, 1e30]
  new, place = draw(st.sampled_from(numbers)), draw(st.integers(0, len(values)))
  changed = [*values[:place], new, *values[place + 1 :]]
  values = draw(st.sampled_from([changed, values[1:], [], values[::-1]]))
  kind = float if any(type(v) is float for v in values) else int
  features[name] = np.array(values, kind)
  return (e, vocab_size, dynamic), encoded, encode_example(features)


@reader(2)
def record(folder):
  """Whole frames and checksums around damaged records."""
  path = folder / "x.tfrecord"

  def read(given):
    (e, vocab_size, dynamic), *two = given
    put(path, b"".join(map(damage.frame, two)))
    features = data_set.record_features(16, 4, e, vocab_size, dynamic, dynamic)
    return record_report.read_record(RecordSet([str(path)]), 1, features)

  def right(given, got):
    got = {name: array.tolist() for name, array in got.items()}
    return got.items() <= feature_values(given[-1]).items()

  return Reader(odd_record(), read, (str(path),), right)


@reader(1.5)
def manifest(folder):
  """Manifests of whole records."""
  path, made = folder / f"data{data_set.MANIFEST_SUFFIX}", []
  for dynamic in (False, True):
    files, _ = write_packed(folder, dynamic)
    made.append(json.loads(path.read_bytes()))

  def load(_):
    record_shape.of_manifest(record_files.find(files), 100)
    first = files.replace("*", "0")
    if found := data_set.find_manifests([first]).get(first):
      found[1].describe(str(folder))
      found[1].mask_settings()

  given = st.sampled_from(made).flatmap(damaged_json)
  return of_file(path, given, load, is_json)


# Vocabularies -----------------------------------------------------------------

TOKENS = [*SPECIAL_TOKENS, "the", "cat", "sat", "on", "##s", "new"]
TOKENS += [*"中éabcdefghij."]
VOCABULARY = "".join(f"{token}\n" for token in TOKENS).encode()
ODD_LINES = ["the cat sat 中中 éé \0 x" + "y" * 300, "", "\ud800", "Küche ﬁ ①"]


def _vocabulary(path):
  kinds.load_tokenizer(path, True).encode_words(ODD_LINES)


@reader(1)
def sentencepiece(folder):
  """SentencePiece models, most of which is their table of normalization."""
  path, made = folder / "m.model", []
  lines = ["the cat sat on the mat, the egg", "Ein Mops. 中文"] * 20
  for lower in (True, False):
    train_tokenizer.train_sentencepiece(lines, str(path), 60, lower)
    made.append(path.read_bytes())

  def load(path):
    encoder = kinds.load_tokenizer(spm_model_file=path)
    words = encoder.encode_words(ODD_LINES)
    return len(encoder.tokens), np.concatenate([line.ids for line in words])

  right = lambda _, got: (got[1] >= 0).all() and (got[1] < got[0]).all()
  given = damaged(made[0], made[1])
  given |= damaged(made[0][:3000]).map(lambda head: head + made[0][3000:])
  return of_file(path, given, load, right)


# Settings ---------------------------------------------------------------------

VALUES = (
  "-1", "0", "1", "2", "8", "-0.5", "0.5", "nan", "inf", "-inf", "1e400",
  "1e39", "-1e39", "1e30", str(10**30), str(2**31), str(2**63), "", "x",
  "0x10", "1_000", "ten", "True", " 5", "1e3", "9" * 400, "9" * 5000, "½",
  "٣", "-", "fp16", "bf16", "lamb", "cosine", "layer", "attention=fp16", "a=b",
  "../x", "out/", "a,a", "a,b/c", ",",
)  # fmt: skip


def odd_flags(kind, **always):
  """Command lines of up to four flags of any values, beside `always`."""
  names = sorted(set(flag_values(kind, [])[0]) - {"bert_config_file"})
  odd = st.dictionaries(
    st.sampled_from(names), st.sampled_from(VALUES), min_size=1, max_size=4
  )
  return odd.map(lambda given: [*words(**always), *words(**given)])


def words(**given):
  return [f"--{name}={value}" for name, value in given.items()]


def training_flags(folder):
  """Flags that are always given, and how a run reads a command line."""
  bert = put(folder / "bert.json", json.dumps(TINY).encode())
  plan_fields = (
    "train_batch_size", "num_train_steps", "num_accumulation_steps",
    "global_batch_size",
  )  # fmt: skip

  def read(line):
    flags, _ = flag_values(PretrainingConfig, line)
    config = measuring.config_of(PretrainingConfig, flags)
    plan = training_plan.resolve(
      ranks=config.dry_run_ranks or 1,
      records=None if config.dry_run else 1 << 40,
      num_warmup_steps=config.warmup_of(config.num_train_steps),
      **{name: getattr(config, name) for name in plan_fields},
    )
    updates = np.linspace(0, plan.updates - 1, 5).astype(np.int64)
    rates = np.float32(config.planned_schedule(plan)(np.unique(updates)))
    mixed_precision.policy_of(config).describe()
    record_shapes.of_patterns(None, config)
    return config, rates

  always = dict(
    bert_config_file=bert, do_train="true", input_file="x", objective="mlm",
    output_dir="out",
  )  # fmt: skip
  return always, read


def has_rates(_, got):
  return np.isfinite(got[1]).all() and (got[1] >= 0).all()


@reader(1.5)
def run_flags(folder):
  """Flags of run_pretraining.py, of all values and combinations."""
  always, read = training_flags(folder)
  given = odd_flags(PretrainingConfig, **always)
  return Reader(given, read, ("--", "lag"), has_rates)


@reader(1)
def bert_config(folder):
  """BERT configs: what a file says is what the model is."""
  always, read = training_flags(folder)
  load = lambda path: (
    read(words(**{**always, "bert_config_file": path}))[0].bert
  )

  def right(data, bert):
    theirs, ours = damage.strict_json(data), bert.to_dict()
    return all(ours.get(name, value) == value for name, value in theirs.items())

  config = {**TINY, "hidden_act": "gelu", **NO_DROPOUT}
  return of_file(folder / "x.json", damaged_json(config), load, right)


CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
RECIPE = json.loads((CONFIGS / "large_batch_phase1.json").read_text())


@reader(1.5)
def config_json(folder):
  """DeepSpeed-style JSON."""
  always, read = training_flags(folder)
  load = lambda path: read(words(**always, config_json=path))
  right = lambda data, got: is_json(data, got) and has_rates(data, got)
  made = of_file(folder / "x.json", damaged_json(RECIPE), load, right)
  # An error may name the flag of a field instead.
  return made._replace(names=(*made.names, "--"))


@reader(1.5)
def data_flags(folder):
  """Flags of create_pretraining_data.py."""
  del folder
  kind = creation.CreationSettings
  read = lambda line: parsed(kind, line)[0]
  right = lambda _, got: got.max_predictions_per_seq <= got.max_seq_length
  given = odd_flags(kind, input_file="x", output_file="y", vocab_file="v")
  return Reader(given, read, ("--", "lag"), right)


# Text -------------------------------------------------------------------------

TEXT = (
  "The cat sat on the mat. It was new.\nEin Mops, éé!\n\n"
  "今天天气好。我去北京。\n"
  "a b c\n\nthe cats\nsat sitting on mats\n\n\nthe end, of\nthis document\n"
) * 3
ODD = (
  "\0", "\u2028", "\x85", "\ufeff", "\r", "\x1c", "\x0b", "\u0301" * 500,
  "\u0301\u0316" * 300, "ﷺ", "\u202e", "Σ", "İ", "\U000e0001", "a" * 3000,
  "[MASK]", "\n" * 300, '"', "가" * 50, "ẞ", " " * 999, "\udcff",
)  # fmt: skip
ODD_RECORDS = (
  "", " ", "{", "[1]", "null", '{"text": 1}', '{"\\ud800": 1}', "x",
  '{"text": "\\ud800 x"}', "[" * 100_000, "9" * 5000, "\ufeff{}",
  '{"text": "a", "text": 2}', '{"text": "x"}', "\n" * 9999,
)  # fmt: skip
NAMES = ("t.txt", "t.txt", "t.jsonl", "t.txt.gz", "t.jsonl.zst")
ENCODINGS = ["utf-8"] * 9 + ["utf-16", "utf-32", "latin-1", "utf-8-sig"]


@st.composite
def odd_file(draw, names=NAMES):
  """(name, bytes, language): odd text, as JSON Lines, compressed, damaged."""
  text, name = TEXT, draw(st.sampled_from(names))
  for _ in range(draw(st.integers(0, 4))):
    place = draw(st.integers(0, len(text)))
    text = text[:place] + draw(st.sampled_from(ODD)) + text[place:]
  if "jsonl" in name:
    lines = [json.dumps({"text": part}) for part in text.split("\n\n")]
    lines.append(draw(st.sampled_from(ODD_RECORDS)))
    text = "\n".join(lines)
  code = draw(st.sampled_from(ENCODINGS))
  data = text.encode(code, "surrogateescape" if code == "utf-8" else "replace")
  if draw(st.integers(0, 2)) == 2:
    data = draw(damaged(data))
  if name.endswith(("gz", "zst")):
    data = (gzip if name.endswith("gz") else zstd).compress(data)
    if draw(st.booleans()):
      data = draw(damaged(data))
  return name, data, draw(st.sampled_from(["", "", "en", "zh"]))


@reader(2)
def text(folder):
  """Text in all encodings, plain, compressed and as JSON Lines."""
  put(folder / "vocab.txt", VOCABULARY)
  encoder = kinds.load_tokenizer(str(folder / "vocab.txt"), True)

  def read(given):
    name, data, prose = given
    form = text_files.TextFormat(prose=prose)
    lines = list(text_files.read_lines([put(folder / name, data)], form))
    encoder.encode_batch(lines)
    return lines

  def right(given, lines):
    name, data, prose = given
    if name != "t.txt" or prose:  # others are too like the reader itself
      return True
    want = data.decode("utf-8-sig").removesuffix("\n").split("\n")
    return "\0" not in "".join(lines) and lines == [s.strip() for s in want]

  return Reader(odd_file(), read, (str(folder / "t."),), right)


@reader(0.2)
def create(folder):
  """The same, made into records."""
  put(folder / "vocab.txt", VOCABULARY)
  out = folder / "out"

  def read(given):
    name, data, prose = given
    shutil.rmtree(out, ignore_errors=True)
    settings = creation.CreationSettings(
      input_file=put(folder / name, data), output_file=f"{out}/x.tfrecord",
      vocab_file=str(folder / "vocab.txt"), max_seq_length=32, dupe_factor=2,
      max_predictions_per_seq=5, prose=prose,
      workers=launchers.WorkerSettings(num_workers=1),
    )  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()):
      creation.create(settings)
    return list(RecordSet([f"{out}/x.tfrecord"]))

  right = lambda _, got: all(map(feature_values, got))
  names = (str(folder / "t."), "the input", "--num_shards")
  return Reader(odd_file(), read, names, right)


@reader(0.3)
def tokenizer(folder):
  """Vocabularies of odd text, and corpora prepared from it."""
  made = str(folder / "made")

  def read(given):
    (name, data, _), kind, size = given
    path = put(folder / name, data)
    if kind == "corpus":
      corpus = prepare_corpus.CorpusSettings(made + "s", path)
      return prepare_corpus.prepare(corpus)
    settings.check(train_tokenizer.Settings(path, made, vocab_size=size))
    train = getattr(train_tokenizer, f"train_{kind}")
    train(text_files.read_lines([path]), made, size, True)
    files = {"vocab_file" if kind == "wordpiece" else "spm_model_file": made}
    return kinds.load_tokenizer(**files).vocab_size

  def right(given, got):
    return given[1] == "corpus" or got <= max(given[2], 5)

  makers = st.sampled_from(["wordpiece"] * 2 + ["sentencepiece", "corpus"])
  sizes = st.sampled_from([-1, 0, 5, 6, 30, 60, 60, 60, 300, 1 << 33, 10**30])
  names = (str(folder / "t."), "--vocab_size", "no words", "documents")
  given = st.tuples(odd_file(), makers, sizes)
  return Reader(given, read, (*names, "SentencePiece"), right)


# Checkpoints ------------------------------------------------------------------


@reader(0.5)
def checkpoint(folder, markers=True):
  """A run's checkpoints: it resumes, or another run starts from them."""
  from checkpoints import checkpointing
  from common.tensorflow_v1 import tf
  from gradients import distributed
  from records import record_order

  run, made, graph = folder / "run", {}, tf.Graph()
  threads = dict(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
  run.mkdir()
  with graph.as_default():
    tf.train.get_or_create_global_step()
    tf.get_variable("bert/kernel", [8, 16])
    tf.get_variable("bert/bias", [16])
    checkpointing.TrainingState(record_order.Order(100, 5))
    saver = checkpointing.Checkpointer(str(run), distributed.Comm(), keep=3)
    variables = {v.op.name: v for v in tf.global_variables()}
    session = tf.Session(config=tf.ConfigProto(**threads))
    session.run(tf.global_variables_initializer())
    for step in (5, 9):
      variables["global_step"].load(step, session)
      made[step] = session.run(variables)
      saver.save(session, step)
      saver.finish()
      if not markers:
        (run / f"model.ckpt-{step}.json").unlink()
  files = {path.name: path.read_bytes() for path in sorted(run.iterdir())}

  def content(name):
    """Strategy of (name, bytes); None: a folder, "": no file."""
    whole, other = files[name], files.get(name.replace("-9", "-5"), b"")
    some = [damaged(whole, other), st.sampled_from([None, "", ""])]
    if name.endswith(".json"):
      some += [damaged_json(json.loads(whole))] * 2
    elif name == "checkpoint":
      lists = (b"x", b"model.ckpt-9", b"x" * 5000, b"\xff\xfe")
      some.append(
        st.sampled_from(lists).map(b'model_checkpoint_path: "%s"'.__mod__)
      )
    return st.tuples(st.just(name), st.one_of(*some))

  def read(given):
    """What resumed (a path), or what was loaded; then all values."""
    changed, started_from = given
    shutil.rmtree(run)
    run.mkdir()
    for name, data in {**files, **dict(changed)}.items():
      if data != "":
        put(run / name, data)
    with graph.as_default(), contextlib.redirect_stderr(io.StringIO()):
      restore = saver.restore
      if started_from:
        path = f"{run}/{started_from}"
        got = restore.initialise(session, path, None).loaded
      else:
        got = restore.has_checkpoint() and restore.resume(session)
      return got, session.run(variables)

  def right(given, result):
    got, values = result
    if not got:  # it looks like a first save that was cut short
      names = [path.name for path in run.iterdir()]
      return not any(n.endswith((".json", "checkpoint")) for n in names)
    wants = made.values() if given[1] else [made[int(got.rpartition("-")[2])]]
    names = got if given[1] else variables
    return any(
      all(np.array_equal(want[n], values[n]) for n in names) for want in wants
    )

  changes = st.sampled_from(sorted(files)).flatmap(content)
  changes = st.lists(changes, min_size=1, max_size=2)
  started_from = st.sampled_from([None, "model.ckpt-9", "model.ckpt-*"])
  given = st.tuples(changes, started_from)
  return Reader(given, read, (str(run),), right)


@reader(0.5)
def foreign_checkpoint(folder):
  """The same without markers, as TensorFlow wrote them."""
  return checkpoint(folder, markers=False)


# Fine-tuning and Hugging Face -------------------------------------------------

TABLE = b"a\tb\tc\n" + b"the cat\tsat on\tyes\n" * 5
WORDS = b"# a comment\nthe O\ncat B-CAT\n\nsat O\n" * 3
ANSWERS = [{"text": "the cat", "answer_start": 0}]
QUESTION = dict(id="a", question="who?", is_impossible=False, answers=ANSWERS)
SQUAD = {"data": [{"paragraphs": [
  {"context": "the cat sat", "qas": [QUESTION]}]}]}  # fmt: skip
TASK = {
  "task": "classifier", "labels": ["no", "yes"], "max_seq_length": 24,
  "columns": {"text": "a", "text_pair": None, "label": "c"},
  "do_lower_case": True, "vocabulary": {"vocab_file": "vocab.txt"},
}  # fmt: skip
THEIRS = {
  **TINY, "model_type": "bert", "architectures": ["BertModel"],
  "id2label": {"0": "no", "1": "yes"}, "layer_norm_eps": 1e-12,
}  # fmt: skip
TOKENIZER = {
  "model": {
    "type": "WordPiece", "unk_token": "[UNK]", "max_input_chars_per_word": 9,
    "continuing_subword_prefix": "##",
    "vocab": {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4,
              "the": 5},
  },
  "normalizer": {"type": "Lowercase"},
  "added_tokens": [],
}  # fmt: skip
JSONL = odd_file(["t.jsonl"]).map(lambda made: made[1])


def _table(path):
  from corpus import tables

  tables.read_table(path)


def _squad(path):
  from finetuning import squad

  squad.read_squad(path, False, True)


def _words(path):
  from finetuning import sentences

  sentences.read_sentences(path, sentences.SentenceSettings(), True)


def _folder(path):
  """A model's folder, of ours or of Hugging Face's."""
  from checkpoints import description
  from model import huggingface_config, huggingface_weights
  from text_encoders import tokenizer_files

  folder = str(pathlib.Path(path).parent)
  if path.endswith("task.json"):
    description.read(folder)
  elif path.endswith("config.json"):
    huggingface_config.read_config(folder)
  elif path.endswith("tokenizer.json"):
    tokenizer_files.cases_by_file(f"{folder}/vocab.txt")
    encoder = kinds.load_tokenizer(tokenizer_file=path)
    encoder.encode_words(ODD_LINES)
  else:
    huggingface_weights.read_tensors(folder)


SAFETENSORS = safetensors.numpy.save({"a": np.ones([3, 5], np.float32)})
# Files alone: name, damaged bytes, how it is read, whether that is right.
for _row in (
  ("table.tsv", damaged(TABLE), _table),
  ("table.csv", damaged(TABLE.replace(b"\t", b",")), _table),
  ("table.jsonl", JSONL, _table),
  ("words.conll", damaged(WORDS), _words),
  ("words.jsonl", JSONL, _words),
  ("squad.json", damaged_json(SQUAD), _squad, is_json),
  ("vocab.txt", damaged(VOCABULARY), _vocabulary),
  ("any.json", damaged_json(RECIPE), json_files.read, is_json),
  ("task.json", damaged_json(TASK), _folder, is_json),
  ("config.json", damaged_json(THEIRS), _folder, is_json),
  ("tokenizer.json", damaged_json(TOKENIZER), _folder, is_json),
  ("model.safetensors", damaged(SAFETENSORS), _folder),
):
  READERS[_row[0]] = (
    lambda folder, row=_row: of_file(folder / row[0], *row[1:]),
    0.5,
  )
