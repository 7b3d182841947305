"""From records to batches: a function of (seed, epoch, rank).

`record_order` says which records a rank reads; a source has their content.
`Source` reads record files and draws dynamic masks from (seed, epoch, record);
their share may follow the time, which no two runs have alike.
Any other source has its `len`, `columns`, `batch`, `weights` and `explain`.
"""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import modeling
from checkpoints import agreement
from common.errors import DataError
from common.tensorflow_v1 import monotonic_seconds, tf
from config import record_shapes
from records import data_set, masking, record_files, record_order, tfrecord
from records.record_report import read_record
from records.record_shape import RecordShape
from records.tf_example import decode_example

# Records of a rank to read at once: TensorFlow's and NumPy's calls take 0.4 ms,
# masks 2 ms, and each record 7 us.
_RECORDS_AT_ONCE = 1024
_RECORDS_IN_TIME = 64  # if their masks follow the clock, when they are read

_BITS_OF_ONE = int(np.float32(1.0).view(np.int32))

# A session raises these for a record that does not parse: TensorFlow's message
# may quote bytes that are not UTF-8.
READ_ERRORS = (tf.errors.OpError, UnicodeDecodeError)


def pretraining_batch(
  columns: dict, row_weights: tf.Tensor
) -> modeling.PretrainingBatch:
  """A batch of `columns`, name -> Tensor [rows, ...]; empty rows weigh 0."""
  masked = columns["masked_lm_weights"] * row_weights[:, None]
  return modeling.PretrainingBatch(
    **{**columns, "masked_lm_weights": masked}, example_weights=row_weights
  )


def pretraining_weights(batch: modeling.PretrainingBatch) -> tf.Tensor:
  """float [rows, 2]: masked tokens and examples of each row."""
  masked = tf.reduce_sum(batch.masked_lm_weights, axis=1)
  examples = tf.reduce_sum(modeling.example_weights(batch), axis=1)
  return tf.stack([masked, examples], axis=1)


class Source:
  """Record files, checked against the run's shape."""

  batch = staticmethod(pretraining_batch)
  weights = staticmethod(pretraining_weights)

  def __init__(self, files: record_files.RecordFiles, shape: RecordShape):
    """Checks the first record of each file."""
    self.files, self.shape = files, shape
    self.paths, self.manifests = files.paths, files.manifests
    self.set = tfrecord.RecordSet(self.paths)
    # For `explain`: a pipeline raises another type with a page of text.
    self.error: DataError | None = None
    self._check_files()
    # One record shows whether a file is of the right kind; all are too many.
    for first in self.set.starts:
      self.check_record(first)

  def _check_files(self) -> None:
    """Raises `DataError` if files, manifests and shape do not agree."""
    shape = self.shape
    firsts: dict = {}  # what all files must have alike -> (manifest, value)
    counts, sizes = self.set.counts, self.set.sizes
    for path, count, size in zip(self.paths, counts, sizes, strict=True):
      if path not in self.manifests:
        continue
      where, manifest = self.manifests[path]
      info = manifest.shards[os.path.basename(path)]
      if (info.records, info.bytes) != (count, size):
        raise DataError(
          f"{path}: {count:,} records in {size:,} bytes, but {where} lists "
          f"{info.records:,} in {info.bytes:,}: they are not of one data "
          "set. Copy both again, or remove the manifest of other records"
        )
      if not manifest.has_pairs and (shape.next_sentence or shape.segments):
        raise DataError(
          f"{path}: its records have no pairs of segments (see {where}), which "
          "this model learns: give --objective=mlm and --nosegment_ids to "
          "train another, or make records with create_pretraining_data.py "
          "--objective=mlm_nsp"
        )
      tokenizer = manifest.tokenizer
      if tokenizer.vocab_size > shape.vocab_size:
        raise DataError(
          f"{path}: its vocabulary {tokenizer.file} has {tokenizer.vocab_size} "
          f"tokens, but the BERT config has vocab_size={shape.vocab_size} (see "
          f"{where}): use the config of that vocabulary"
        )
      facts = {"vocabulary": agreement.vocabulary(tokenizer)}
      facts["masking"] = manifest.masking
      if manifest.masking == "dynamic":
        for name in ("masked_lm_prob", "do_whole_word_mask"):
          facts[name] = manifest.settings.get(name, False)
      for name, value in facts.items():
        first, wanted = firsts.setdefault(name, (where, value))
        if value != wanted:
          raise DataError(
            f"{first} has {name}={wanted}, {where} {name}={value}: give "
            "records of one kind"
          )
    # A file of a data set that was made again without it.
    known = {data_set.data_set_of(path) for path in self.manifests}
    for path in self.paths:
      if path not in self.manifests and data_set.data_set_of(path) in known:
        raise DataError(
          f"{path} is in no manifest, but others of its name are: a command "
          "that was stopped left it. Remove it"
        )

  @property
  def packing_factor(self) -> float:
    """Examples in a record on average, as the manifests say; 1 without."""
    examples = 0.0
    for path, count in zip(self.paths, self.set.counts, strict=True):
      listing = self.manifests.get(path)
      examples += count * (listing[1].packing_factor if listing else 1.0)
    return examples / len(self.set)

  def __len__(self) -> int:
    return len(self.set)

  def columns(self, numbers, epochs, progress, seed: int) -> dict:
    """The parsed records `numbers`, name -> Tensor [rows, ...].

    All are tensors [rows], as `Rows` has them; `seed` is that of dynamic masks.
    """

    def read(numbers, epochs, progress):
      keys = masking.record_keys(seed, epochs, numbers)
      probs = self.shape.mask_probs(progress)
      # Few of TensorFlow's ops know uint64.
      return self.read(numbers), keys.view(np.int64), probs

    kinds = [tf.string, tf.int64, tf.float64]
    tensors = tf.numpy_function(read, [numbers, epochs, progress], kinds)
    for tensor in tensors:
      tensor.set_shape(numbers.shape)
    return _parse(tensors, self.shape)

  def describe(self) -> dict:
    tokenizer = self.files.tokenizer
    return {
      "files": self.paths,
      "records": len(self.set),
      "contents": data_set.digest(self.paths, self.manifests),
      "manifests": sorted({path for path, _ in self.manifests.values()}),
      "tokenizer": tokenizer and dataclasses.asdict(tokenizer),
    }

  def contents(self) -> str:
    """What the records are, by sizes and manifests; the same on all ranks."""
    return f"{data_set.digest(self.paths, self.manifests)} {self.set.sizes}"

  def fingerprint(self) -> str:
    """A digest of sizes, contents and shape: the same on all ranks."""
    facts = hashlib.sha256(f"{self.contents()} {self.shape}".encode())
    files, digest = len(self.paths), facts.hexdigest()[:12]
    return f"{files} files with {len(self.set)} records ({digest})"

  def locate(self, number: int) -> dict:
    path, index = self.set.locate(number)
    return {"file": path, "record": index}

  def check_record(self, number: int) -> None:
    """Raises `DataError` if the record does not fit the shape."""
    features, where = self.shape.features(), self.set.where(number)
    data, length = self.set.read(number), 0
    with contextlib.suppress(DataError):  # `read_record` says what is wrong
      length = len(decode_example(data).get("input_ids", ()))
    if length not in (0, self.shape.max_seq_length):
      raise DataError(
        f"{where}: records of {length} tokens, but --max_seq_length or their "
        f"manifest says {self.shape.max_seq_length}: leave the flag out, or "
        "copy the manifest with which they were made"
      )
    try:
      record = read_record(self.set, number, features)
    except DataError as e:
      raise DataError(
        f"{e} Copy NAME.manifest.json beside the records, or give "
        "--max_seq_length and --max_predictions_per_seq as they were made"
      ) from e
    if self.shape.masks and "masked_lm_ids" in record:
      raise DataError(
        f"{where}: the record has masks of its own, but those of the first "
        "file are drawn on reading: give records of one kind"
      )
    if self.shape.next_sentence and not record["segment_ids"].any():
      raise DataError(
        f"{where}: it is no pair of segments: copy NAME.manifest.json, which "
        "says so, beside it, or give --objective=mlm"
      )

  def special_ids(self) -> list[int]:
    """[CLS] and [SEP]: what the first records all begin and end with."""
    # No manifest need say them; ten records of any text differ elsewhere.
    firsts, lasts = set[int](), set[int]()
    for number in range(min(10, len(self.set))):
      record = decode_example(self.set.read(number))
      tokens = record["input_ids"][record["input_mask"] > 0].tolist()
      firsts.update(tokens[:1])
      lasts.update(tokens[-1:])
    return [ids.pop() for ids in (firsts, lasts) if len(ids) == 1]

  def read(self, numbers: np.ndarray) -> np.ndarray:
    try:
      return np.array(self.set.read_many(numbers), object)
    except DataError as e:
      self.error = e
      raise

  def explain(self, numbers: np.ndarray) -> DataError | None:
    """The error behind one that the pipeline raised on records `numbers`."""
    if self.error is not None:
      return self.error
    for number in numbers:
      try:
        self.check_record(int(number))
      except DataError as e:
        return e
    return None


def open_records(files: str, config, comm, training: bool = True) -> Source:
  """Opens record files, which must be the same on all ranks.

  `config` is a `PretrainingConfig`; masks that are drawn on reading are
  training's, or an evaluation's.
  """
  opened = record_files.find(files)
  shape = record_shapes.of_run(opened, config, training)
  if shape.max_seq_length > config.bert.max_position_embeddings:
    raise DataError(
      f"{files}: records of {shape.max_seq_length} tokens, but the BERT config "
      f"has max_position_embeddings={config.bert.max_position_embeddings}"
    )
  source = Source(opened, shape)
  comm.check_equal(f"what is in {files}", source.fingerprint())
  return source


def unused_rows(vocab_size: int, manifests: dict) -> list[str]:
  """A line if the model has rows for more tokens than its records."""
  known = {m.tokenizer.vocab_size: m.tokenizer for _, m in manifests.values()}
  tokens = max(known, default=vocab_size)
  if tokens >= vocab_size:
    return []
  return [
    f"the BERT config has vocab_size={vocab_size:,}, but the records' "
    f"vocabulary {known[tokens].file} has {tokens:,} tokens: "
    f"{vocab_size - tokens:,} rows would never be used. A new run can have "
    f"vocab_size={tokens}, as --bert_config_file=tiny, mini, base or large has"
  ]


def _parse(tensors: Sequence, shape: RecordShape) -> dict:
  """Parses, checks and masks: name -> int32 or float32 [n, ...].

  `tensors`: serialized records, int64 `masking.record_keys`, and float64 shares
  of each record's tokens to choose; [n] each.
  """
  serialized, keys, probs = tensors
  features, types = shape.features(), {}
  for name, (size, bound) in features.items():
    kind = tf.float32 if bound is None else tf.int64
    types[name] = tf.FixedLenFeature([size], kind)
  parsed = tf.parse_example(serialized, types)
  checks = [tf.debugging.assert_equal(_positions_are_right(parsed), True)]
  for name, (_, bound) in features.items():
    values = parsed[name]
    if bound is None:
      # A weight is 0 or 1 in its bits: TensorFlow takes denormals for 0.
      bits = tf.bitcast(values, tf.int32)
      is_right = tf.equal(bits, 0) | tf.equal(bits, _BITS_OF_ONE)
    else:
      is_right = (values >= 0) & (values < bound)
    checks.append(tf.debugging.assert_equal(is_right, True))
  with tf.control_dependencies(checks):
    for name, values in parsed.items():
      kind = tf.int32 if values.dtype == tf.int64 else values.dtype
      parsed[name] = tf.identity(tf.cast(values, kind))
  if shape.masks:
    parsed = _masked(parsed, keys, probs, shape)
  if not shape.segments:
    parsed["segment_ids"] = tf.zeros_like(parsed["segment_ids"])
  return parsed


def _positions_are_right(parsed: dict) -> tf.Tensor:
  """Whether `record_report.read_record` would find nothing in any record."""
  mask = parsed["input_mask"]
  before, here = mask[:, :-1], mask[:, 1:]
  next_example = tf.equal(here, before + 1) & (before > 0)
  follows = tf.equal(here, before) | next_example | tf.equal(here, 0)
  right = tf.reduce_all(follows) & tf.reduce_all(tf.equal(mask[:, 0], 1))
  if "masked_lm_weights" not in parsed:
    return right
  # Predictions lie within an example, and no two at one position.
  masked, used = parsed["masked_lm_positions"], parsed["masked_lm_weights"] > 0
  within = tf.gather(mask, tf.minimum(masked, mask.shape[1] - 1), batch_dims=1)
  # Unused positions may repeat: each becomes a negative number of its own.
  unique = -1 - tf.range(masked.shape[1], dtype=tf.int64)
  in_order = tf.sort(tf.where(used, masked, unique + tf.zeros_like(masked)))
  return (
    right
    & tf.reduce_all(tf.logical_not(used) | (within > 0))
    & tf.reduce_all(tf.not_equal(in_order[:, 1:], in_order[:, :-1]))
  )


def _masked(parsed: dict, keys, probs, shape) -> dict:
  tokens = [parsed[n] for n in ("input_ids", "input_mask", "segment_ids")]
  continues = parsed.pop("is_continuation", None)
  continuation, masks = [continues] if shape.whole_words else [], shape.masks

  def draw(ids, mask, segments, keys, probs, *continuation):
    settings = masks._replace(masked_lm_prob=probs)
    rest = keys.view(np.uint64), settings, *continuation
    return tuple(masking.mask_records(ids, mask, segments, *rest))

  kinds = [tf.int32, tf.int32, tf.int32, tf.float32]
  arguments = [*tokens, keys, probs, *continuation]
  ids, *drawn = tf.numpy_function(draw, arguments, kinds)
  ids.set_shape(parsed["input_ids"].shape)
  for tensor in drawn:
    tensor.set_shape([ids.shape[0], shape.max_predictions_per_seq])
  names = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
  return {**parsed, "input_ids": ids, **dict(zip(names, drawn, strict=True))}


def _iterator(dataset: tf.data.Dataset):
  options = tf.data.Options()
  # There is nothing to tune, and the tuner's thread sleeps ever longer: a new
  # start of the iterator, and the session's end, waited 5 to 40 s for it.
  options.autotune.enabled = False
  return tf.data.make_initializable_iterator(dataset.with_options(options))


class Rows(NamedTuple):
  """What a rank reads for some updates: n rows, in m micro-batches.

  NumPy's arrays, or TensorFlow's tensors of them.
  """

  numbers: Any  # int64 [n], of the records in their source
  epochs: Any  # int64 [n]
  progress: Any  # float64 [n], how far the run, stage or cooldown is: 0 to 1
  real: Any  # float32 [n], 0 for a row that only fills up
  update: Any  # int64 [m], ascending from 0, of each micro-batch
  number: Any  # int32 [m], update * micro-batches per update + place
  records: Any  # int64 [m], of the micro-batch's update, over all ranks


_ROW_TYPES = Rows(
  numbers=tf.int64, epochs=tf.int64, progress=tf.float64, real=tf.float32,
  update=tf.int64, number=tf.int32, records=tf.int64,
)  # fmt: skip


def update_rows(
  plan,
  order: record_order.Order,
  comm,
  first: int,
  updates: int = 1,
  share: float = 0.0,
) -> Rows:
  """The rows that a rank reads for `updates` updates from update `first` on.

  `share`: how far the run is by time.
  """
  positions, real, update, number, records = [], [], [], [], []
  for index in range(updates):
    now = first + index
    micro_batches, size = plan.micro_batches_of(now), plan.records_of(now)
    # All micro-batches are full rows: where a batch does not divide, the last
    # record stands in those that have none.
    rows = micro_batches * plan.micro_batch
    in_update = comm.rank * rows + np.arange(rows)
    real.append(in_update < size)
    positions.append(plan.records_before(now) + np.minimum(in_update, size - 1))
    update.append(np.full(micro_batches, index))
    number.append(now * plan.accumulation + np.arange(micro_batches))
    records.append(np.full(micro_batches, size))
  in_stream = np.concatenate(positions)
  updates_of_micro = np.concatenate(update)
  updates_of_rows = first + np.repeat(updates_of_micro, plan.micro_batch)
  return Rows(
    numbers=order.records(in_stream),
    epochs=in_stream // order.count,
    # Masks follow whichever is further along, the updates or the time.
    progress=np.clip(plan.progress(updates_of_rows), share, 1.0),
    real=np.concatenate(real).astype(np.float32),
    update=updates_of_micro,
    number=np.concatenate(number).astype(np.int32),
    records=np.concatenate(records),
  )


class MicroBatch(NamedTuple):
  """The data of one forward pass, with its update's numbers."""

  batch: tuple  # of the source's `batch`
  number: tf.Tensor  # int32: update * micro-batches per update + place
  weights: tf.Tensor  # float [heads]: of all this rank's micro-batches
  records: tf.Tensor  # int64: of the update, over all ranks


def _micro_batches(source, rows: Rows, size: int, seed: int) -> MicroBatch:
  """Micro-batches of `size` rows, which are tensors, along a new first axis."""
  columns = source.columns(rows.numbers, rows.epochs, rows.progress, seed)
  batch = source.batch(columns, rows.real)

  def split(tensor):
    return tf.reshape(tensor, [-1, size, *tensor.shape[1:]])

  of_micro = tf.reduce_sum(split(source.weights(batch)), axis=1)
  of_update = tf.math.segment_sum(of_micro, rows.update)
  return MicroBatch(
    batch=type(batch)(*map(split, batch)),
    number=rows.number,
    weights=tf.gather(of_update, rows.update),
    records=rows.records,
  )


@dataclasses.dataclass(frozen=True)
class Batches:
  """A stream of this rank's batches.

  A position is a training's updates made, or an evaluation's batches.
  """

  next: tuple  # of Tensors
  start: Callable[[tf.Session, int], None]  # at a position
  numbers: Callable[[int], np.ndarray]  # position -> int64 [records read]
  count: int = 0  # batches on this rank; 0 if endless
  ready_at: tf.Tensor | None = None  # float64, the clock when `next` was ready


@tf.autograph.experimental.do_not_convert  # converting takes a second
def training_batches(
  source, order: record_order.Order, plan, comm, share=None
) -> Batches:
  """This rank's micro-batches, endless; `next` is a `MicroBatch`.

  `share`: () -> how far the run is by time, if that is farther than by updates.
  """
  first = tf.placeholder(tf.int64, [], "updates_made")
  if share and not source.shape.masks_move:
    share = None
  records_at_once = _RECORDS_IN_TIME if share else _RECORDS_AT_ONCE
  at_once = -(-records_at_once // (plan.micro_batch * plan.accumulation))
  ahead = record_order.ReadAhead(source.set, order) if order.block else None

  def rows_from(update) -> Rows:
    if ahead:
      start = plan.records_before(update)
      ahead(start, plan.records_before(update + at_once) - start)
    passed = share() if share else 0.0
    return update_rows(plan, order, comm, int(update), at_once, passed)

  def load(index) -> MicroBatch:
    update = first + index * at_once
    rows = Rows(*tf.numpy_function(rows_from, [update], list(_ROW_TYPES)))
    for tensor in rows:
      tensor.set_shape([None])
    return _micro_batches(source, rows, plan.micro_batch, order.seed)

  # Reads the next records before the last ones are used up.
  dataset = tf.data.Dataset.range(np.iinfo(np.int64).max // at_once)
  dataset = dataset.map(load).prefetch(1).unbatch()
  dataset = dataset.map(lambda micro: (micro, monotonic_seconds()))
  iterator = _iterator(dataset.prefetch(2))
  micro, ready_at = iterator.get_next()
  return Batches(
    next=micro,
    ready_at=ready_at,
    start=lambda sess, update: sess.run(iterator.initializer, {first: update}),
    numbers=lambda update: rows_from(update).numbers,
  )


def fake_batch(shape: RecordShape, count: int) -> dict:
  """Random records with all predictions: name -> array [count, ...]."""
  # Always the same: what is measured on them can be compared.
  rng, most = np.random.default_rng(0), shape.max_predictions_per_seq
  sizes = shape.max_seq_length, most, shape.vocab_size
  examples, records = shape.examples_per_record, []
  for _ in range(count):
    records.append(data_set.fake_features(rng, *sizes, examples, most))
  return {name: np.stack([r[name] for r in records]) for name in records[0]}


def fixed_micro_batch(columns: dict, accumulation: int) -> MicroBatch:
  """A micro-batch of `fake_batch`, the same in all places of an update."""
  # No constants: TensorFlow would compute their results once, ahead of time.
  tensors = {}
  for name, column in columns.items():
    tensors[name] = tf.placeholder_with_default(column, column.shape)
  rows = columns["input_ids"].shape[0]
  batch = pretraining_batch(tensors, tf.ones([rows]))
  update = tf.convert_to_tensor(tf.train.get_or_create_global_step())
  return MicroBatch(
    batch=batch,
    number=tf.cast(update, tf.int32),
    weights=tf.reduce_sum(pretraining_weights(batch), axis=0)
    * float(accumulation),
    records=tf.constant(rows * accumulation, tf.int64),
  )


@tf.autograph.experimental.do_not_convert  # converting takes a second
def evaluation_batches(source, batch_size, comm, limit: int = 0) -> Batches:
  """This rank's share of all records, once; `next` is the source's `batch`.

  Rows that fill up weigh 0. `limit`: the most records over all ranks; 0: all.
  """
  count = min(len(source), limit) if limit else len(source)
  mine = range(comm.rank, count, comm.size)
  batches = -(-len(mine) // batch_size)
  first_of = lambda batch: batch * batch_size

  def load(batch):
    positions = first_of(batch) + tf.range(batch_size, dtype=tf.int64)
    is_real = positions < len(mine)
    # Rows that fill up repeat the last record.
    numbers = comm.rank + comm.size * tf.minimum(positions, len(mine) - 1)
    # Epoch 0 and seed 0: each evaluation of any training has the same masks.
    epochs = tf.zeros_like(numbers)
    progress = tf.zeros([batch_size], tf.float64)
    columns = source.columns(numbers, epochs, progress, seed=0)
    return source.batch(columns, tf.cast(is_real, tf.float32))

  iterator = _iterator(tf.data.Dataset.range(batches).map(load).prefetch(2))
  return Batches(
    next=iterator.get_next(),
    start=lambda sess, _: sess.run(iterator.initializer),
    numbers=lambda batch: np.array(mine[first_of(batch) : first_of(batch + 1)]),
    count=batches,
  )
