"""Batches: the records of the stream, whole, in any world; resumable."""

import collections
import dataclasses
import itertools
import math
import os

import numpy as np
import pytest
import runs
from samples import (
  fake_records,
  feature_values,
  write_config,
  write_packed,
  write_records,
  write_shard,
)

import input_pipeline
from benchmarks.step import first_batch
from common.errors import UserError
from common.tensorflow_v1 import tf
from config import record_shapes, training_plan
from gradients import distributed
from gradients.distributed import Comm
from records import (
  data_set,
  masking,
  record_files,
  record_order,
  record_shape,
  tf_example,
  tfrecord,
)
from text_encoders.base import TokenizerInfo
from training import evaluation

SHAPE = record_shape.RecordShape(32, 5, 100)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
  """A source of 41 records."""
  path = write_records(tmp_path_factory.mktemp("plain") / "a.tfrecord", 41)
  return source_of(path)


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory):
  """The pattern of 120 packed records whose masks are drawn on reading."""
  return write_packed(tmp_path_factory.mktemp("packed"), dynamic=True)[0]


def source_of(files, shape=SHAPE):
  return input_pipeline.Source(record_files.find(files), shape)


def ids_of(source, numbers):
  """input_ids of records, as TensorFlow reads them."""
  records = [source.set.read(int(number)) for number in numbers]
  return [feature_values(record)["input_ids"] for record in records]


def rank(number, size):
  """A world that only says who this is: its collectives are not used."""
  comm = Comm()
  comm.rank, comm.size = number, size
  return comm


def plan_of(ranks, global_batch, micro_batch):
  return training_plan.resolve(
    ranks=ranks, records=None, train_batch_size=micro_batch,
    global_batch_size=global_batch, num_train_steps=100, num_warmup_steps=0,
  )  # fmt: skip


def read_batches(batches, start, count):
  with tf.Session() as session:
    batches.start(session, start)
    return [session.run(batches.next) for _ in range(count)]


def train_on(source, order, plan, start, count, comm=None, share=None):
  """The first `count` micro-batches of a rank from update `start` on."""
  with tf.Graph().as_default():
    batches = input_pipeline.training_batches(
      source, order, plan, comm or Comm(), share
    )
    return read_batches(batches, start, count)


def evaluate_on(source, batch, comm=None):
  """All of a rank's batches."""
  with tf.Graph().as_default():
    batches = input_pipeline.evaluation_batches(source, batch, comm or Comm())
    return read_batches(batches, 0, batches.count)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_shares_a_global_batch(plain, size):
  """It grows: 3, 6, 6, 9 and 9 records, from update 10 and record 100 on.

  Each record is in it once; rows left over weigh nothing.
  """
  order, sizes = record_order.Order(40, 5), [3, 6, 6, 9, 9]
  stage = training_plan.Stage(
    number=1, first_update=10, first_record=100, ramp=((1, 3), (2, 6))
  )
  plan = dataclasses.replace(plan_of(size, 9, 2), stage=stage, updates=15)
  assert [plan.records_of(update) for update in range(10, 15)] == sizes
  starts = [plan.records_before(update) for update in range(10, 16)]
  assert starts == [100, 103, 109, 115, 124, 133]
  assert plan.examples_before(13) == 15
  rows = {update: [] for update in range(12, 15)}
  counts = {update: plan.micro_batches_of(update) for update in rows}
  for r in range(size):
    every = iter(
      train_on(plain, order, plan, 12, sum(counts.values()), rank(r, size))
    )
    for update, found in rows.items():
      share = math.ceil(sizes[update - 10] / size)
      assert counts[update] == math.ceil(share / 2)
      parts = list(itertools.islice(every, counts[update]))
      first = update * plan.accumulation
      numbers = range(first, first + counts[update])
      assert [p.number for p in parts] == [*numbers]
      own, masked = [], 0.0
      for part in parts:
        assert part.batch.input_ids.shape == (2, 32)
        real = part.batch.example_weights == 1
        assert not part.batch.masked_lm_weights[~real].any()
        masked += part.batch.masked_lm_weights.sum()
        own += part.batch.input_ids[real].tolist()
      for part in parts:
        assert part.weights.tolist() == [masked, len(own)]
        assert part.records == sizes[update - 10]
      found += own
  for update, found in rows.items():
    positions = np.arange(starts[update - 10], starts[update - 9])
    assert found == ids_of(plain, order.records(positions))


def test_rows_of_updates():
  """Hand-worked: 2 ranks, batches of 3 then 7 records, micro-batches of 2."""
  order = record_order.Order(10, 5)
  stage = training_plan.Stage(first_update=4, first_record=8, ramp=((1, 3),))
  plan = dataclasses.replace(plan_of(2, 7, 2), stage=stage, updates=7)
  of_ranks = [
    input_pipeline.update_rows(plan, order, rank(r, 2), 4, 2) for r in (0, 1)
  ]
  positions = ([8, 9, 11, 12, 13, 14], [10, 10, 15, 16, 17, 17])
  real = ([1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 0])
  for r, rows in enumerate(of_ranks):
    assert rows.numbers.tolist() == order.records(positions[r]).tolist()
    assert rows.epochs.tolist() == [p // 10 for p in positions[r]]
    assert rows.real.tolist() == real[r]
    assert rows.progress.tolist() == [0.0] * 2 + [0.5] * 4
    assert rows.update.tolist() == [0, 1, 1]
    assert rows.number.tolist() == [8, 10, 11]  # two an update at most
    assert rows.records.tolist() == [3, 7, 7]
  # The same, one update at a time; and where the time is farther.
  later = lambda update: input_pipeline.update_rows(
    plan, order, rank(1, 2), update, share=0.75
  )
  assert later(5).numbers.tolist() == of_ranks[1].numbers[2:].tolist()
  assert later(5).progress.tolist() == [0.75] * 4
  assert later(6).progress.tolist() == [1.0] * 4


@pytest.mark.parametrize("block", [0, 7])
def test_batches_are_the_records_of_the_stream(plain, block):
  """Round trip: what comes out is what the files hold at those numbers."""
  order = record_order.Order(40, 5, block)
  micro = train_on(plain, order, plan_of(1, 8, 4), 2, 6)
  numbers = order.records(np.arange(16, 40)).reshape(6, 4)
  for m, (got, rows) in enumerate(zip(micro, numbers, strict=True)):
    assert got.number == 4 + m  # update 2 of 2 micro-batches, then on
    for row, number in enumerate(rows):
      features = feature_values(plain.set.read(int(number)))
      for name, wanted in features.items():
        found = getattr(got.batch, name)[row]
        np.testing.assert_array_equal(found, wanted, err_msg=name)
      assert len(features) == 7


def dynamic_source(pattern):
  shape = record_shape.of_manifest(record_files.find(pattern), 100)
  return source_of(pattern, shape)


def test_ranks_with_other_contents_or_masks_are_found(dynamic, monkeypatch):
  """Where hosts share no disk, and numbers and sizes are alike."""
  own = dynamic_source(dynamic)
  fingerprint = own.fingerprint()
  assert dynamic_source(dynamic).fingerprint() == fingerprint
  knows = own.shape.knows_words
  own.shape = dataclasses.replace(own.shape, knows_words=not knows)
  assert own.fingerprint() != fingerprint
  monkeypatch.setattr(data_set, "digest", lambda paths, manifests: "other")
  assert dynamic_source(dynamic).fingerprint() != fingerprint


def assert_masked(source, batch, positions, prob):
  """`batch` is of positions of the order 120, 5, masked by the function."""
  numbers = record_order.Order(120, 5).records(positions)
  records = [tf_example.decode_example(source.set.read(n)) for n in numbers]
  tokens = []
  for name in ("input_ids", "input_mask", "segment_ids", "is_continuation"):
    tokens.append(np.stack([record[name] for record in records]))
  *tokens, continuation = tokens
  keys = masking.record_keys(5, positions // 120, numbers)
  probs = np.full(len(numbers), prob)
  masks = source.shape.masks._replace(masked_lm_prob=probs)
  words = [continuation] if source.shape.whole_words else []
  want = masking.mask_records(*tokens, keys, masks, *words)
  for name, values in want._asdict().items():
    np.testing.assert_array_equal(getattr(batch, name), values, err_msg=name)


@pytest.mark.parametrize("size", [1, 3])
def test_dynamic_masks_are_a_function_of_seed_epoch_and_record(dynamic, size):
  """In two epochs of 120: some batches have parts of both. Ranks resume."""
  source, order = dynamic_source(dynamic), record_order.Order(120, 5)
  plan, own = plan_of(size, 36, 36), 36 // size
  masks = source.shape.masks.masked_lm_prob
  for r in range(size):
    parts = train_on(source, order, plan, 2 * r, 7 - 2 * r, rank(r, size))
    for update, part in enumerate(parts, 2 * r):
      positions = 36 * update + own * r + np.arange(own)
      assert_masked(source, part.batch, positions, masks)
  # The same record in both epochs: other masks for most.
  numbers = np.arange(120)
  keys = [masking.record_keys(5, epoch, numbers) for epoch in (0, 1)]
  assert (keys[0] != keys[1]).all()
  assert (keys[0] != masking.record_keys(6, 0, numbers)).all()


@pytest.mark.parametrize("size", [1, 2])
def test_the_share_of_masks_moves_over_the_run(dynamic, size):
  """From 30% of the first update to 10% of the 100th, by updates or by time."""
  source, order = dynamic_source(dynamic), record_order.Order(120, 5)
  masks = source.shape.masks._replace(
    masked_lm_prob=0.3, max_predictions_per_seq=12
  )
  source.shape = dataclasses.replace(
    source.shape, max_predictions_per_seq=12, masks=masks, last_prob=0.1,
    whole_words=False,
  )  # fmt: skip
  half = lambda: 0.5  # of the time has passed
  for update, by_time, share in (
    (50, None, 0.3 - 0.2 * 50 / 99), (99, None, 0.1), (0, half, 0.2),
  ):  # fmt: skip
    for r in range(size):
      plan, own = plan_of(size, 24, 24), 24 // size
      (micro,) = train_on(
        source, order, plan, update, 1, rank(r, size), by_time
      )
      positions = 24 * update + own * r + np.arange(own)
      assert_masked(source, micro.batch, positions, share)


@pytest.mark.parametrize("whole", [True, False])
def test_words_and_replacements_are_as_the_flags_say(dynamic, tmp_path, whole):
  masks = masking.MaskConfig(
    masked_lm_prob=(0.3, 0.3), do_whole_word_mask=whole, mask_replace_prob=1.0,
    random_replace_prob=0.0,
  )  # fmt: skip
  tiny = write_config(tmp_path / "config.json"), dynamic
  config = runs.config(
    tiny, "unused", masks=masks, max_predictions_per_seq=None
  )
  source = source_of(dynamic, record_shapes.of_patterns(dynamic, config))
  order = record_order.Order(120, 5)
  (micro,) = train_on(source, order, plan_of(1, 120, 120), 0, 1)
  assert_masked(source, micro.batch, np.arange(120), 0.3)
  rows, slots = np.nonzero(micro.batch.masked_lm_weights)
  masked = micro.batch.masked_lm_positions[rows, slots]
  mask_id = source.shape.masks.mask_id
  assert (micro.batch.input_ids[rows, masked] == mask_id).all()
  assert source.shape.whole_words == whole


def test_dynamic_masks_of_an_evaluation_stay(dynamic):
  source = dynamic_source(dynamic)
  first, second = (evaluate_on(source, 7) for _ in "ab")
  whole = first_batch(source, 120)
  for a, b in zip(first, second, strict=True):
    np.testing.assert_array_equal(a.masked_lm_positions, b.masked_lm_positions)
  positions = np.concatenate([b.masked_lm_positions for b in first])[:120]
  np.testing.assert_array_equal(positions, whole["masked_lm_positions"])
  weights = np.concatenate([b.masked_lm_weights for b in first])
  assert weights[120:].sum() == 0 and weights[:120].sum(axis=1).min() > 0
  assert 200 < weights.sum() < 500


@pytest.mark.parametrize("size, batch", [(3, 5), (3, 64)])
def test_evaluation_counts_every_record_once(plain, size, batch):
  seen = collections.Counter()
  for r in range(size):
    for got in evaluate_on(plain, batch, rank(r, size)):
      assert got.input_ids.shape == (batch, 32)
      real = got.example_weights == 1
      seen.update(row.tobytes() for row in got.input_ids[real])
      assert got.masked_lm_weights[~real].sum() == 0
  assert len(seen) == 41 and set(seen.values()) == {1}
  with tf.Graph().as_default():  # but for a limit of records
    batches = input_pipeline.evaluation_batches(plain, 4, Comm(), 12)
  assert batches.count == 3


def test_an_evaluation_lists_no_records_beforehand():
  """Of more records than numbers fit in memory: the rank's are computed."""

  class Source:
    def __len__(self):
      return 10**15

    def columns(self, numbers, epochs, progress, seed):
      return {"numbers": numbers}

    def batch(self, columns, row_weights):
      return columns["numbers"], row_weights

  with tf.Graph().as_default():
    batches = input_pipeline.evaluation_batches(Source(), 4, rank(2, 3))
    ((numbers, weights),) = read_batches(batches, 0, 1)
  assert numbers.tolist() == [2, 5, 8, 11] and weights.tolist() == [1.0] * 4
  assert batches.count == -(-(10**15 // 3) // 4)
  last = batches.numbers(batches.count - 1)
  assert last.dtype == np.int64 and last.tolist() == [10**15 - 2]


def test_records_of_another_shape_are_refused(plain, tmp_path):
  path = plain.set.paths[0]
  for shape, words in (
    ((16, 5, 100), "record 0.*32 tokens.* 16: leave the flag"),
    ((32, 7, 100), "masked_lm.*5.*7.*max_predictions_per_seq"),
    ((32, 5, 50), "expected 0 to 49"),
  ):
    words = f"{path}.*{words}"
    refused(path, words, record_shape.RecordShape(*shape))
  path = write_records(tmp_path / "a.tfrecord", 8, vocab_size=10)
  write_manifest(path, 8, tokenizer={"vocab_size": 500})
  refused(path, r"v\.txt has 500 .*vocab_size=100")


def failing(source, build):
  """`explain` of the numbers of a batch, of batches whose reading fails."""
  with tf.Graph().as_default():
    batches = build()
    with pytest.raises(tf.errors.OpError) as error:
      read_batches(batches, 0, 2)
    assert not isinstance(error.value, tf.errors.OutOfRangeError)
  return lambda number: source.explain(batches.numbers(number))


def test_a_bad_record_inside_is_found_and_named(tmp_path):
  """The pipeline fails on it, and `explain` says which of them it was."""
  path = str(tmp_path / "a.tfrecord")
  features = fake_records(8, seed=0)
  features[6]["masked_lm_ids"][0] = 100  # one more than the vocabulary has
  write_shard(path, features)
  source = source_of(path)
  evaluated = failing(
    source, lambda: input_pipeline.evaluation_batches(source, 4, Comm())
  )
  assert evaluated(0) is None
  source = source_of(path)
  order, plan = record_order.Order(8, 1), plan_of(1, 2, 2)
  trained = failing(  # of those that are read at once
    source,
    lambda: input_pipeline.training_batches(source, order, plan, Comm()),
  )
  for message in (str(evaluated(1)), str(trained(0))):
    assert "record 6" in message and "masked_lm_ids holds 100" in message


def test_a_damaged_record_is_named(tmp_path):
  path = write_records(tmp_path / "a.tfrecord", 8)
  data = bytearray((tmp_path / "a.tfrecord").read_bytes())
  offsets = np.load(path + ".index")
  data[offsets[5] + 40] ^= 1
  (tmp_path / "a.tfrecord").write_bytes(data)
  source = source_of(path)
  explain = failing(
    source, lambda: input_pipeline.evaluation_batches(source, 8, Comm())
  )
  message = str(explain(0))
  assert path in message and "record 5" in message and "damaged" in message


def write_manifest(path, count, **changed):
  """A manifest of the record file `path`."""
  made = dict(kind="wordpiece", file="v.txt", sha256="0" * 64, vocab_size=100)
  made |= {"do_lower_case": True, "mask_id": 4, **changed.pop("tokenizer", {})}
  size = changed.pop("bytes", os.path.getsize(path))
  info = tfrecord.ShardInfo(os.path.basename(path), count, size, "0" * 64)
  values = dict(
    max_seq_length=32, max_predictions_per_seq=5, examples_per_record=1,
    masking="static", settings={"masked_lm_prob": 0.15}, counts={},
    tokenizer=TokenizerInfo(**made),
  ) | changed  # fmt: skip
  manifest = data_set.Manifest(**values, files=(info,))
  manifest.save(path.removesuffix(".tfrecord") + ".manifest.json")


def refused(files, words, shape=SHAPE):
  with pytest.raises(data_set.DataError, match=words):
    source_of(files, shape)


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"bytes": 7}, r"b\.tfrecord: 8 records in .* lists 8 in 7: they are not"),
    ({"masking": "dynamic"}, r"a\.manifest.*=static, .*b\.man.*=dynamic"),
    ({"tokenizer": {"do_lower_case": False}}, "=lower-cased .*=cased "),
    (
      {"settings": {"masked_lm_prob": 0.15, "do_whole_word_mask": True}},
      r"do_whole_word_mask=False, .*/b\.mani.* do_whole_word_mask=True",
    ),
  ],
)
def test_record_files_of_two_kinds_are_refused(tmp_path, changed, message):
  """Packed records of other masks may have no room for those of these."""
  paths = [write_records(tmp_path / f"{n}.tfrecord", 8) for n in "ab"]
  # Those of settings are drawn on reading: the files' own have none.
  kind = {"masking": "dynamic"} if "settings" in changed else {}
  write_manifest(paths[0], 8, **kind)
  if not kind:
    write_manifest(paths[1], 8)
    source = source_of(",".join(paths))
    assert source.files.tokenizer.sha256 == "0" * 64
  write_manifest(paths[1], 8, **kind, **changed)
  refused(",".join(paths), message)


@pytest.mark.parametrize("name", ["t-00000-of-00001", "t-00001-of-00004", "t"])
def test_what_a_stopped_command_left_is_no_data(tmp_path, name):
  made = write_records(tmp_path / "t-00000-of-00002.tfrecord", 8)
  write_manifest(made, 8)
  other = write_records(tmp_path / "u-00001-of-00004.tfrecord", 8)
  assert len(source_of(f"{made},{other}").set) == 16
  left = write_records(tmp_path / f"{name}.tfrecord", 8)
  refused(f"{made},{left}", f"{name}.tfrecord is in no manifest")


def test_records_with_masks_are_not_masked_again(plain):
  """They are without a manifest."""
  masks = masking.MaskSettings(0.15, 5, 100, 4)
  shape = dataclasses.replace(SHAPE, masks=masks)
  refused(plain.set.paths[0], "has masks of its own, but", shape)


def test_records_whose_manifest_is_missing(tmp_path):
  """What they are cannot always be seen in them."""
  (features,) = fake_records(1, seed=0)
  features["segment_ids"][:] = 0
  alone, drawn = (str(tmp_path / f"{name}.tfrecord") for name in "ab")
  write_shard(alone, [features])
  for name in ("positions", "ids", "weights"):
    del features[f"masked_lm_{name}"]
  write_shard(drawn, [features])
  refused(alone, "no pair of segments: copy NAME")
  shape = dataclasses.replace(SHAPE, next_sentence=False)
  source_of(alone, shape)
  refused(drawn, "no feature 'masked_lm_pos.* NAME.manifest.json", shape)


def test_an_error_in_a_folder_named_horovod_is_no_lost_rank(tmp_path):
  trace = (
    'DataError: bad\n  File "/x/horovod/input_pipeline.py", line 1, in read'
  )
  assert distributed.rank_lost(ValueError(trace)) is None
  lost = ValueError("HorovodAllreduce failed: shut down")
  assert distributed.rank_lost(lost)
  # NCCL's reason names no Horovod, and the message of a wrong flag may.
  known = distributed.RankLost("NCCL does not connect the ranks' GPUs")
  assert distributed.rank_lost(known) is known
  assert distributed.rank_lost(UserError("HorovodRun: no such flag")) is None
  path = write_records(tmp_path / "a.tfrecord", 8)
  source = source_of(path)
  source.error = data_set.DataError("record 3 is damaged")
  assert evaluation.clear_error(lost, source) is source.error
