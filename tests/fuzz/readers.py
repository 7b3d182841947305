"""What is damaged, how it is read, and what would be right."""

import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import math
import pathlib
import shutil
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from absl import flags
from backports import zstd
from hypothesis import strategies as st

import tokenization
from common import json_files, settings
from data import (
  creation,
  record_report,
  record_shape,
  records,
  text_files,
  tf_example,
)
from data.tfrecord import INDEX_SUFFIX, RecordSet, ShardWriter, verify_file
from tests.fuzz import damage
from tests.fuzz.damage import damaged, damaged_json
from tests.support.samples import (
  NO_DROPOUT,
  TINY,
  feature_values,
  write_packed,
)
from tools import prepare_corpus, train_tokenizer


class Reader(NamedTuple):
  """A reader of the project.

  Attributes:
    given: strategy of its inputs.
    read: reads one, or refuses it with an error for the user.
    names: the error names one of these.
    wrong: (input, what was read) -> what is not right in it, "" if nothing.
  """

  given: st.SearchStrategy
  read: Callable
  names: tuple
  wrong: Callable


READERS = {}  # name -> (how to make it, its share of all inputs)


def reader(share):
  """Registers a function from an empty folder to a `Reader`."""

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


def of_file(path, given, load, right=None):
  """A reader of one file; `right`: (bytes, what was read) -> bool."""
  # One time in thirty there is a folder in its place.
  given = st.one_of(*[given] * 30, st.none())
  is_wrong = lambda data, got: data is None or (right and not right(data, got))
  read = lambda data: load(put(path, data))
  wrong = lambda data, got: "other values" if is_wrong(data, got) else ""
  return Reader(given, read, (str(path),), wrong)


def is_json(data, _):
  """Whether a text is JSON to the letter of the standard."""
  with contextlib.suppress(ValueError):
    damage.strict_json(data)
    return True


# -----------------------------------------------------------------------------
# Records
# -----------------------------------------------------------------------------


def record_file(folder):
  """Records, their path, what their manifest says, the file and its index."""
  rng, path = np.random.default_rng(0), folder / "x.tfrecord"
  made = [rng.bytes(int(n)) for n in rng.integers(0, 200, 12)]
  with ShardWriter(str(path)) as writer:
    for record in made:
      writer.write(record)
  index = folder / f"x.tfrecord{INDEX_SUFFIX}"
  return made, path, writer.info, path.read_bytes(), index


@reader(1.5)
def framing(folder):
  """Record files, with or without an index and their manifest's hash."""
  made, path, info, whole, index = record_file(folder)
  saved = index.read_bytes()

  def resized(number, length):  # under a checksum of its own
    start = sum(16 + len(record) for record in made[:number])
    head = length + damage.masked_crc(length)
    return whole[:start] + head + whole[start + 12 :]

  def read(given):
    data, has_index, verified = given
    put(path, data)
    index.unlink(missing_ok=True)
    if has_index:
      put(index, saved)
    if verified:
      verify_file(str(path), info if has_index else None)
    return list(RecordSet([str(path)]))

  def wrong(given, got):
    data, has_index, verified = given
    if got == made and has_index:  # it says where records are
      return ""
    whole = not (has_index and verified) and got == damage.unframed(data)
    return "" if got and whole else "other records"

  lengths = st.sampled_from(damage.HUGE)
  lengths |= st.integers(0, 300).map(lambda n: struct.pack("<Q", n))
  other = b"".join(damage.frame(record[::-1]) for record in made)
  data = damaged(whole, other) | st.builds(resized, st.integers(0, 11), lengths)
  given = st.tuples(data, st.booleans(), st.booleans())
  return Reader(given, read, (str(path),), wrong)


class _Code:
  """Unpickled, it leaves a file: code of an input must not run."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return open, (self.path, "w")


@reader(1.5)
def index(folder):
  """Indexes of whole record files."""
  made, path, _, _, index = record_file(folder)
  saved, ran = index.read_bytes(), folder / "ran"
  offsets = np.load(index)
  size, top = int(offsets[-1]), np.iinfo(np.int64).max

  def file_of(save, *arrays):
    out = io.BytesIO()
    save(out, *arrays)
    return out.getvalue()

  def changed(place, value):
    array = offsets.copy()
    array[place] = value
    return file_of(np.save, array)

  def shaped(shape):
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n"
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text))
    return head + text.encode() + saved[128:]

  others = [offsets.astype(t) for t in ("i4", "u8", ">i8", "f8", "O", "S9")]
  others += [offsets[None], offsets[0], offsets[:0], offsets[:1], offsets[1:]]
  others += [np.array([0, top, -top + 16, -20, size])]  # differences overflow
  others += [np.array([_Code(str(ran))] * 2, object)]
  files = [file_of(np.save, array) for array in others]
  files += [file_of(np.savez, offsets)]
  files += map(shaped, ("(-1,)", "(1<<60,)", "(13,)*9", "(" * 5000, "()"))
  values = st.sampled_from([-1, size + 1, top, -top]) | st.integers(0, size)
  given = damaged(saved) | st.sampled_from(files)
  given |= st.builds(changed, st.integers(0, len(offsets) - 1), values)
  load = lambda _: list(RecordSet([str(path)]))
  right = lambda _, got: got == made and not ran.exists()
  return of_file(index, given, load, right)._replace(names=(str(path),))


def features_of(seed, e, vocab_size, dynamic):
  """The features of a record of 16 tokens."""
  rng = np.random.default_rng(seed)
  features = records.fake_features(rng, 16, 4, vocab_size, e)
  if dynamic:
    for name in ("positions", "ids", "weights"):
      del features[f"masked_lm_{name}"]
    features["is_continuation"] = rng.integers(0, 2, 16)
  return features


@st.composite
def odd_record(draw):
  """(settings, record): damaged, or with one feature of other values."""
  choices = ([1, 3], [30, 300], [False, True])  # of examples, tokens, masks
  shape = tuple(draw(st.sampled_from(some)) for some in choices)
  one, other = (features_of(seed, *shape) for seed in (0, 1))
  encoded = tf_example.encode_example(one)
  if draw(st.booleans()):
    other = tf_example.encode_example(other)
    return shape, encoded, draw(damaged(encoded, other))
  values = one[name := draw(st.sampled_from(sorted(one)))].tolist()
  new = draw(
    st.sampled_from([0, 1, 2, 3, 15, 16, 29, 30, 300, 2**63 - 1])
    if one[name].dtype.kind == "i" and draw(st.booleans())
    else st.sampled_from([math.nan, math.inf, -0.5, 0.0, 1.0, 1e30])
  )
  place = draw(st.integers(0, len(values) - 1))
  changed = [*values[:place], new, *values[place + 1 :]]
  values = draw(
    st.sampled_from([changed, values[1:], [*values, new], [], values[::-1]])
  )
  kind = float if any(type(v) is float for v in values) else int
  one[name] = np.array(values, kind)
  return shape, encoded, tf_example.encode_example(one)


def by_tensorflow(record: bytes) -> dict | None:
  """name -> list of values; None if it is no Example."""
  from google.protobuf.message import DecodeError

  with contextlib.suppress(DecodeError):
    return feature_values(record)


def breaks_schema(values, e, vocab_size) -> bool:
  """Whether a record's values, by name, cannot be of up to `e` examples."""
  mask = list(values["input_mask"])
  most = dict.fromkeys(values, 2) | {
    "input_ids": vocab_size, "masked_lm_ids": vocab_size,
    "input_mask": e + 1, "masked_lm_positions": len(mask),
  }  # fmt: skip
  for name, some in values.items():
    if any(not 0 <= v < most[name] or v % 1 for v in some):
      return True
  tokens = mask.index(0) if 0 in mask else len(mask)
  steps = {b - a for a, b in itertools.pairwise([0, *mask[:tokens]])}
  if mask[:1] != [1] or any(mask[tokens:]) or not steps <= {0, 1}:
    return True
  weights = values.get("masked_lm_weights", ())
  pairs = zip(values.get("masked_lm_positions", ()), weights, strict=True)
  used = [position for position, weight in pairs if weight]
  return len({*used}) < len(used) or not all(mask[i] for i in used)


@reader(2)
def record(folder):
  """Whole frames and checksums around damaged records."""
  path = folder / "x.tfrecord"

  def read(given):
    (e, vocab_size, dynamic), *two = given
    put(path, b"".join(map(damage.frame, two)))
    features = records.record_features(16, 4, e, vocab_size, dynamic, dynamic)
    return record_report.read_record(RecordSet([str(path)]), 1, features)

  def wrong(given, got):
    got = {name: array.tolist() for name, array in got.items()}
    if breaks_schema(got, *given[0][:2]):
      return "values that cannot be"
    want = by_tensorflow(given[-1]) or {}
    return "" if got.items() <= want.items() else "other values"

  return Reader(odd_record(), read, (str(path),), wrong)


@reader(0.1)
def pipeline(folder):
  """The same, as training reads them."""
  import input_pipeline
  from data import masking

  def read(given):
    (e, vocab_size, dynamic), *two = given
    path = put(folder / "x.tfrecord", b"".join(map(damage.frame, two)))
    rate = 0.1 if e > 1 else 0.15
    masks = masking.MaskSettings(rate, 4, 4, vocab_size) if dynamic else None
    source = input_pipeline.Source(
      path,
      record_shape.RecordShape(16, 4, vocab_size, e, masks, dynamic, dynamic),
    )
    try:
      return input_pipeline.first_batch(source, 2)
    except input_pipeline.READ_ERRORS as error:
      if explained := source.explain(np.arange(2)):
        raise explained from error
      raise

  def wrong(given, got):
    values = {name: rows[1].tolist() for name, rows in got.items()}
    return "schema" if breaks_schema(values, *given[0][:2]) else ""

  return Reader(odd_record(), read, (str(folder / "x.tfrecord"),), wrong)


@reader(1.5)
def manifest(folder):
  """Manifests of whole records: what was read says what the file says."""
  path, made = folder / f"data{records.MANIFEST_SUFFIX}", []
  for dynamic in (False, True):
    files, _ = write_packed(folder, dynamic)
    made.append(json.loads(path.read_bytes()))

  def load(_):
    record_shape.of_manifest(files, 100)
    found = records.find_manifest(files.replace("*", "0"))
    if found:
      found[1].describe(str(folder))
      found[1].mask_settings()
    return found

  def right(data, got):
    raw = damage.strict_json(data)
    if not got:  # another data set's
      return all(info["name"] != "data-0.tfrecord" for info in raw["files"])
    again = json.loads(json.dumps(dataclasses.asdict(got[1])))
    return {**again, "version": 1} == raw

  return of_file(path, st.sampled_from(made).flatmap(damaged_json), load, right)


# -----------------------------------------------------------------------------
# Vocabularies
# -----------------------------------------------------------------------------

TOKENS = [*tokenization.SPECIAL_TOKENS, "the", "cat", "sat", "on", "##s", "new"]
TOKENS += [*"中éabcdefghij."]
VOCABULARY = "".join(f"{token}\n" for token in TOKENS)
ODD_LINES = ["the cat sat 中中 éé \0 x" + "y" * 300, "", "\ud800", "Küche ﬁ ①"]


@reader(1)
def vocab(folder):
  """vocab.txt files."""
  whole = VOCABULARY.encode()
  others = [VOCABULARY.encode(e) for e in ("utf-16", "utf-32", "utf-8-sig")]
  others += [whole.replace(b"\n", b"\r\n"), b"\n" * 100_000, whole * 2]
  for token in ("", "the", "[PAD]", "x" * 100_000, "a b", "\0", "##", "\u2028"):
    others += [
      whole.replace(old, token.encode()) for old in (b"sat", b"[MASK]")
    ]

  def load(path):
    encoder = tokenization.load_tokenizer(path, True)
    encoder.encode_words(ODD_LINES[:1])
    encoder.info()
    return encoder.tokens

  def right(data, tokens):
    found = [line.strip() for line in data.decode().split("\n")]
    filled = [token for token in found if token]
    special = {*tokenization.SPECIAL_TOKENS} <= {*filled}
    once = len({*filled}) == len(filled)
    return special and once and [t for t in tokens if t] == filled

  given = damaged(whole) | st.sampled_from(others)
  return of_file(folder / "vocab.txt", given, load, right)


@reader(1)
def sentencepiece(folder):
  """SentencePiece models: their bytes, and messages of other values."""
  from sentencepiece import sentencepiece_model_pb2

  proto, path = sentencepiece_model_pb2.ModelProto, folder / "m.model"
  lines = [
    "the cat sat on the mat, the egg",
    "Ein Mops stahl ein Ei. 中文",
  ] * 20
  one, two = [], []
  for made in (one, two):
    train_tokenizer.train_sentencepiece(lines, str(path), 60, made is one)
    made.append(path.read_bytes())

  @st.composite
  def changed(draw):
    model = proto.FromString(one[0])
    number = st.sampled_from([-1, 0, 1, 5, 1 << 30, -(1 << 31)])
    words = ["", "\0", "the", "[PAD]", "x" * 10_000, "\u2581"]
    normalizer, trainer = model.normalizer_spec, model.trainer_spec
    for _ in range(draw(st.integers(1, 3))):
      piece = draw(st.sampled_from(list(model.pieces)))
      owner, name, values = draw(st.sampled_from([
        (piece, "score", st.sampled_from([math.nan, math.inf, 1e38, 0.0])),
        (piece, "piece", st.sampled_from(words)),
        (piece, "type", st.integers(1, 6)),
        (trainer, "model_type", st.integers(1, 4)),
        *((trainer, f"{n}_id", number) for n in ("unk", "pad", "bos", "eos")),
        (normalizer, "name", st.sampled_from(["", "nfkc", "x"])),
        (normalizer, "precompiled_charsmap",
         damaged(normalizer.precompiled_charsmap)),
      ]))  # fmt: skip
      setattr(owner, name, draw(values))
    del model.pieces[draw(st.integers(0, 600)) :]
    return model.SerializePartialToString()

  def load(path):
    encoder = tokenization.load_tokenizer(None, True, path)
    encoder.info()
    return encoder.tokens, encoder.encode_words(ODD_LINES)

  def right(data, got):
    tokens, words = got
    pieces = proto.FromString(data).pieces
    finite = all(math.isfinite(piece.score) for piece in pieces)
    ids = [i for line in words for i in line.ids]
    in_range = all(0 <= i < len(tokens) for i in ids)
    return finite and in_range and [p.piece for p in pieces] == tokens

  return of_file(path, damaged(one[0], two[0]) | changed(), load, right)


# -----------------------------------------------------------------------------
# Settings
# -----------------------------------------------------------------------------

VALUES = (
  "-1", "0", "1", "2", "8", "-0.5", "0.5", "nan", "inf", "-inf", "1e400",
  "1e39", "-1e39", "1e30", str(10**30), str(2**31), str(2**63), "", "x",
  "0x10", "1_000", "ten", "True", " 5", "1e3", "9" * 400, "9" * 5000, "½",
  "٣", "-", "fp16", "bf16", "lamb", "cosine", "layer", "attention=fp16", "a=b",
  "../x", "out/", "a,a", "a,b/c", ",",
)  # fmt: skip


def odd_flags(always):
  """Up to four flags of any values, beside some that are always given."""
  modules = flags.FLAGS.flags_by_module_dict().items()
  names = {f.name for m, found in modules for f in found if m[:4] != "absl"}
  names = st.sampled_from(sorted(names - {"bert_config_file"}))
  odd = st.dictionaries(names, st.sampled_from(VALUES), min_size=1, max_size=4)
  return odd.map(lambda given: {**always, **given})


def parsed(given):
  """The flags of a command line."""
  flags.FLAGS.unparse_flags()
  flags.FLAGS(["command", *(f"--{n}={v}" for n, v in given.items())])
  return flags.FLAGS


def numbers_of(settings):
  """(name, number) of a dataclass and of those in it."""
  for field in dataclasses.fields(settings):
    value = getattr(settings, field.name)
    if dataclasses.is_dataclass(value):
      yield from numbers_of(value)
    elif type(value) in (int, float):
      yield field.name, value


def no_number(settings):
  """A number that no setting may have; "" if there is none."""
  odd = (f"{n}={v}" for n, v in numbers_of(settings) if not 0 <= v <= 3.4e38)
  return next(odd, "")


def training_flags(folder):
  """Flags that are always given, and how a run reads flags."""
  import run_pretraining
  from config import training_plan
  from config.pretraining import PretrainingConfig

  if "do_train" not in flags.FLAGS:
    run_pretraining.define_flags()
  bert = put(folder / "bert.json", json.dumps(TINY).encode())
  always = dict(
    bert_config_file=bert, do_train="true", input_file="x", objective="mlm"
  )

  def read(given):
    config = PretrainingConfig.from_flags(parsed(given))
    plan = training_plan.resolve(
      ranks=config.dry_run_ranks or 1,
      records=None if config.dry_run else 1 << 40,
      **{
        name: getattr(config, name)
        for name in (
          "train_batch_size", "num_train_steps", "num_warmup_steps",
          "num_accumulation_steps", "global_batch_size",
        )
      },
    )  # fmt: skip
    updates = np.linspace(0, plan.updates - 1, 5).astype(np.int64)
    rates = np.float32(config.planned_schedule(plan)(np.unique(updates)))
    config.policy.describe()
    return config, plan, record_shape.of_run("", config), rates

  return {**always, "output_dir": "out"}, read


def wrong_run(_, got):
  config, plan, shape, rates = got
  if not np.all(np.isfinite(rates)) or np.any(rates < 0):
    return f"learning rates {rates}"
  if plan.updates < 1 or not 0 <= plan.warmup_updates <= plan.updates:
    return "updates"
  if shape.max_predictions_per_seq > shape.max_seq_length:
    return "more to predict than tokens"
  return no_number(config)


@reader(1.5)
def run_flags(folder):
  """Flags of run_pretraining.py, of all values and combinations."""
  always, read = training_flags(folder)
  return Reader(odd_flags(always), read, ("--", "lag"), wrong_run)


@reader(1)
def bert_config(folder):
  """BERT configs: what a file says is what the model is."""
  always, read = training_flags(folder)
  load = lambda path: read({**always, "bert_config_file": path})[0].bert

  def right(data, bert):
    found = bert.to_dict()
    return all(
      found.get(n, v) == v for n, v in damage.strict_json(data).items()
    )

  return of_file(
    folder / "x.json",
    damaged_json({**TINY, "hidden_act": "gelu", **NO_DROPOUT}),
    load,
    right,
  )


CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
RECIPE = json.loads((CONFIGS / "large_batch_phase1.json").read_text())
RECIPE["steps_per_print"] = 10


@reader(1.5)
def config_json(folder):
  """DeepSpeed-style JSON: no field of it is lost."""
  always, read = training_flags(folder)
  fields = {
    "global_batch_size": ("train_batch_size",),
    "train_batch_size": ("train_micro_batch_size_per_gpu",),
    "log_every_steps": ("steps_per_print",),
    "learning_rate": ("optimizer", "params", "lr"),
    "num_train_steps": ("scheduler", "params", "total_num_steps"),
    "lr_offset": ("scheduler", "params", "lr_offset"),
  }

  def right(data, got):
    raw = damage.strict_json(data)
    for name, path in fields.items():
      value = raw
      for key in path:
        value = value.get(key, {})
      if value not in ({}, getattr(got[0], name)):
        return False
    return not wrong_run(data, got)

  load = lambda path: read({**always, "config_json": path})
  made = of_file(folder / "x.json", damaged_json(RECIPE), load, right)
  # An error may name the flag of a field instead.
  return made._replace(names=(*made.names, "--"))


@reader(1.5)
def data_flags(folder):
  """Flags of create_pretraining_data.py."""
  del folder
  settings.define_flags(creation.Settings)

  def read(given):
    return settings.from_flags(creation.Settings, parsed(given))

  def wrong(_, got):
    most = max(got.max_predictions_per_seq, got.examples_per_record)
    return "too many" if most > got.max_seq_length else no_number(got)

  always = {"input_file": "x", "output_file": "y", "vocab_file": "v"}
  return Reader(odd_flags(always), read, ("--", "lag"), wrong)


# -----------------------------------------------------------------------------
# Text
# -----------------------------------------------------------------------------

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


def decompressed(name, data):
  """What is in a file; None if it is not whole."""
  if not name.endswith(("gz", "zst")):
    return data
  with contextlib.suppress(OSError, EOFError, ValueError, zlib.error,
                           zstd.ZstdError):  # fmt: skip
    return (gzip if name.endswith("gz") else zstd).decompress(data)


@st.composite
def odd_file(draw, names=NAMES):
  """(name, bytes, language): odd text, as JSON Lines, compressed, damaged."""
  text = TEXT
  for _ in range(draw(st.integers(0, 4))):
    place = draw(st.integers(0, len(text)))
    text = text[:place] + draw(st.sampled_from(ODD)) + text[place:]
  if "jsonl" in (name := draw(st.sampled_from(names))):
    lines = [json.dumps({"text": part}) for part in text.split("\n\n")]
    if draw(st.booleans()):
      lines[draw(st.integers(0, len(lines) - 1))] = draw(
        st.sampled_from(ODD_RECORDS)
      )
    text = "\n".join(lines)
  codes = ["utf-8"] * 9 + [
    "utf-16",
    "utf-32",
    "latin-1",
    "gb18030",
    "utf-8-sig",
  ]
  code = draw(st.sampled_from(codes))
  errors = "surrogateescape" if code == "utf-8" else "replace"
  data = text.encode(code, errors)
  if draw(st.integers(0, 2)) == 2:
    data = draw(damaged(data))
  if name.endswith(("gz", "zst")):
    data = (gzip if name.endswith("gz") else zstd).compress(data)
    if draw(st.booleans()):
      data = draw(damaged(data))
  return name, data, draw(st.sampled_from(["", "", "en", "zh"]))


def lines_of(name, data):
  """The lines of such a file; ValueError if it cannot be read."""
  if (content := decompressed(name, data)) is None or b"\0" in content:
    raise ValueError
  lines = content.decode().removesuffix("\n").split("\n") if content else []
  lines = [line.strip() for line in lines]
  if "jsonl" not in name:
    return [line.removeprefix("\ufeff").strip() for line in lines[:1]] + lines[
      1:
    ]
  found = []
  for line in filter(None, lines):
    text = json.loads(line.removeprefix("\ufeff"))["text"].replace("\0", "")
    parts = text.encode("utf-8", "ignore").decode().split("\n")
    found += ["", *filter(None, map(str.strip, parts)), ""]
  return found


def encoder_of(folder):
  put(folder / "vocab.txt", VOCABULARY.encode())
  return tokenization.load_tokenizer(str(folder / "vocab.txt"), True)


@reader(2)
def text(folder):
  """Text in all encodings, plain, compressed and as JSON Lines."""
  encoder = encoder_of(folder)
  reference = tokenization.FullTokenizer(str(folder / "vocab.txt"))

  def read(given):
    name, data, prose = given
    form = text_files.TextFormat(prose=prose)
    lines = list(text_files.read_lines([put(folder / name, data)], form))
    return lines, encoder.encode_batch(lines)

  def wrong(given, got):
    lines, want = got[0], lines_of(*given[:2])
    letters = lambda some: sorted("".join("".join(some).split()))
    if lines != want and (not given[2] or letters(lines) != letters(want)):
      return "other lines"
    for line, ids in zip(*got, strict=True):
      tokens = reference.tokenize(line)
      if reference.convert_tokens_to_ids(tokens) != ids.tolist():
        return f"other tokens of {line[:100]!r}"
    return ""

  return Reader(odd_file(), read, (str(folder / "t."),), wrong)


@reader(0.2)
def create(folder):
  """The same, made into records."""
  vocab_size, out = encoder_of(folder).vocab_size, folder / "out"

  def read(given):
    name, data, prose = given
    shutil.rmtree(out, ignore_errors=True)
    settings = creation.Settings(
      input_file=put(folder / name, data), output_file=f"{out}/x.tfrecord",
      vocab_file=str(folder / "vocab.txt"), max_seq_length=32, dupe_factor=2,
      max_predictions_per_seq=5, num_workers=1, prose=prose,
    )  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()):
      return creation.create(settings)

  def wrong(given, got):
    lines_of(*given[:2])
    made = [
      by_tensorflow(record)
      for path in out.glob("*.tfrecord")
      for record in damage.unframed(path.read_bytes())
    ]
    if any(breaks_schema(values, 1, vocab_size) for values in made):
      return "values that cannot be"
    return "" if made and len(made) == got["examples"] else "examples"

  names = (str(folder / "t."), "the input", "--num_shards")
  return Reader(odd_file(), read, names, wrong)


@reader(0.3)
def tokenizer(folder):
  """Vocabularies of odd text, and corpora prepared from it."""
  made = str(folder / "made")
  kinds = ["wordpiece", "wordpiece", "sentencepiece", "corpus"]
  sizes = [-1, 0, 5, 6, 30, 60, 60, 60, 300, 1 << 33, 10**30]

  def read(given):
    (name, data, _), kind, size = given
    path = put(folder / name, data)
    if kind == "corpus":
      shutil.rmtree(made + "s", ignore_errors=True)
      corpus = prepare_corpus.CorpusSettings(made + "s", path)
      return prepare_corpus.prepare(corpus)
    asked = train_tokenizer.Settings(path, made, vocab_size=size)
    settings.check(asked)
    train = getattr(train_tokenizer, f"train_{kind}")
    return train(text_files.read_lines([path]), made, size, True)

  def wrong(given, got):
    (name, data, _), kind, size = given
    lines_of(name, data)
    if kind == "corpus":
      texts = [pathlib.Path(part).read_text("utf-8") for part in got[0]]
      counts = [text.count("\n\n") for text in texts]
      return "" if min(counts) >= 2 else "too few documents"
    files = (made, True, None) if kind == "wordpiece" else (None, True, made)
    right = tokenization.load_tokenizer(*files).vocab_size == got
    return "" if right and got <= max(size, 5) else f"{got} tokens"

  names = (str(folder / "t."), "--vocab_size", "no words", "documents")
  given = st.tuples(odd_file(), st.sampled_from(kinds), st.sampled_from(sizes))
  return Reader(given, read, (*names, "SentencePiece"), wrong)


# -----------------------------------------------------------------------------
# Checkpoints
# -----------------------------------------------------------------------------


def run_folder(folder, markers):
  """Of two checkpoints: (start, strategy of damaged files, values by step)."""
  from checkpoints import checkpointing
  from common.tensorflow_v1 import tf
  from data import record_order
  from gradients import distributed

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
    whole = files[name]
    other = files.get(name.replace("-9", "-5"), b"")
    some = [damaged(whole, other), st.sampled_from([None, "", ""])]
    if name.endswith(".json"):
      some += [damaged_json(json.loads(whole))] * 2
    elif name == "checkpoint":
      line = b'model_checkpoint_path: "%s"\n'
      lists = [line % b"x", line % b"model.ckpt-9" * 2, line % (b"x" * 5000)]
      some += [st.sampled_from([*lists, b"", b"\xff\xfe", b"\0" * 50])]
    return st.tuples(st.just(name), st.one_of(*some))

  def start(changed, how):
    """`how(saver, session, variables)`, and all values after it."""
    shutil.rmtree(run)
    run.mkdir()
    for name, data in {**files, **dict(changed)}.items():
      if data != "":
        put(run / name, data)
    with graph.as_default(), contextlib.redirect_stderr(io.StringIO()):
      return how(saver, session, variables), session.run(variables)

  name = st.sampled_from(sorted(files))
  return start, st.lists(name.flatmap(content), min_size=1, max_size=2), made


@reader(0.7)
def resume(folder, markers=True):
  """A run's own checkpoints, with their markers."""
  start, given, made = run_folder(folder, markers)
  how = lambda saver, session, _: (
    saver.restore.has_checkpoint() and saver.restore.resume(session)
  )

  def wrong(_, got):
    path, values = got
    if not path:  # it looks like a first save that was cut short
      left = [p.name for p in (folder / "run").iterdir()]
      left = [n for n in left if n.endswith((".json", "checkpoint"))]
      return f"a new run beside {left[0]}" if left else ""
    want = made[int(path.rpartition("-")[2])]
    same = all(np.array_equal(want[n], v) for n, v in values.items())
    return "" if same else "other values"

  read = lambda changed: start(changed, how)
  return Reader(given, read, (str(folder / "run"),), wrong)


@reader(0.7)
def init_checkpoint(folder):
  """Checkpoints of others as --init_checkpoint."""
  start, given, made = run_folder(folder, False)
  names = ["model.ckpt-9"] * 12 + ["model.ckpt-9.index", "", "model.ckpt-*"]

  def read(given):
    changed, name, counts_on = given

    def how(saver, session, variables):
      first = variables["training_state/schedule_start"] if counts_on else None
      return saver.restore.initialise(session, f"{folder}/run/{name}", first)

    return start(changed, how)

  def wrong(given, got):
    report, values = got
    steps = [
      step
      for step in ((9,) if given[1] else (5, 9))
      if all(np.array_equal(values[n], made[step][n]) for n in report.loaded)
    ]
    first = values["training_state/schedule_start"]
    right = report.loaded and steps and (not given[2] or first in steps)
    return "" if right else "other values"

  given = st.tuples(given, st.sampled_from(names), st.booleans())
  return Reader(given, read, (str(folder / "run"),), wrong)


@reader(0.5)
def resume_foreign(folder):
  """The same without markers, as TensorFlow wrote them."""
  return resume(folder, markers=False)


# -----------------------------------------------------------------------------
# Fine-tuning and Hugging Face: refused, or read without another error
# -----------------------------------------------------------------------------

TABLE = b"a\tb\tc\n" + b"the cat\tsat on\tyes\n" * 5
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
  "model": {"type": "WordPiece", "vocab": {"[UNK]": 0, "the": 1}},
  "normalizer": {"type": "BertNormalizer", "lowercase": True},
  "added_tokens": [{"id": 2, "content": "[CLS]"}],
}


@reader(0.5)
def squad(folder):
  from finetuning import squad

  load = lambda path: squad.read_squad(path, False, True)
  return of_file(folder / "x.json", damaged_json(SQUAD), load, is_json)


@reader(0.5)
def task(folder):
  from checkpoints import description

  load = lambda path: description.read(str(folder))
  return of_file(folder / "task.json", damaged_json(TASK), load, is_json)


def _table(folder, ending, given):
  from finetuning import tables

  return of_file(folder / f"x.{ending}", given, tables.read_table)


@reader(0.5)
def tsv(folder):
  return _table(folder, "tsv", damaged(TABLE))


@reader(0.5)
def csv(folder):
  return _table(folder, "csv", damaged(TABLE.replace(b"\t", b",")))


@reader(0.5)
def jsonl(folder):
  given = odd_file(["t.jsonl"]).map(lambda made: made[1])
  return _table(folder, "jsonl", given)


@reader(0.5)
def their_config(folder):
  from model import huggingface_config

  load = lambda _: huggingface_config.read_config(str(folder))
  return of_file(folder / "config.json", damaged_json(THEIRS), load, is_json)


@reader(0.5)
def their_weights(folder):
  from model import huggingface_weights

  huggingface_weights.write_tensors(
    str(folder), {"a": np.ones([3, 5], np.float32)}
  )
  path = folder / "model.safetensors"
  load = lambda _: huggingface_weights.read_tensors(str(folder))
  return of_file(path, damaged(path.read_bytes()), load)


@reader(0.5)
def their_tokenizer(folder):
  from checkpoints import huggingface_folder

  def load(_):
    huggingface_folder.vocabulary_file(str(folder))
    huggingface_folder.read_case(str(folder), {})

  path = folder / "tokenizer.json"
  return of_file(path, damaged_json(TOKENIZER), load, is_json)


@reader(0.5)
def json_file(folder):
  given = damaged_json(RECIPE)
  return of_file(folder / "x.json", given, json_files.read, is_json)
