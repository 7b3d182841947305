"""Fine-tuning examples as packed records in memory, for `input_pipeline`.

A record is a row of up to `max_seq_length` tokens and `examples_per_record`
examples. Each attends only to itself and begins at position 0 (see
`modeling.BertModel`), so it has the same loss as alone.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from common import tensorflow_v1 as later
from common.errors import DataError, UserError
from config import training_plan
from finetuning import task_file
from records import packing

# Least tokens of a row, if max_seq_length allows: short rows pack badly.
_ROW_TOKENS = 128


class Example(NamedTuple):
  """One input of the encoder."""

  ids: np.ndarray  # int32 [n], [CLS] and [SEP] included
  segments: np.ndarray  # int32 [n], 0 or 1
  where: str  # line or id, for a person
  targets: Sequence = ()  # numbers that the task's loss compares with
  weight: float = 1.0  # of its loss in the mean; 0: not in it


class FinetuningBatch(NamedTuple):
  """One rank's micro-batch: Tensors of B rows of S tokens, up to E examples."""

  input_ids: Any  # int32 [B, S]
  input_mask: Any  # int32 [B, S], the token's example from 1, 0 padding
  segment_ids: Any  # int32 [B, S]
  targets: Any  # int32 or float32 [B, E, T], or int32 [B, S] of tokens
  weights: Any  # float32 [B, E], 0 where no example has a loss


def rounding(plan: training_plan.TrainingPlan) -> list[str]:
  """A line if whole records have many more or fewer examples than asked for."""
  if abs(plan.divisor - 1.0) < 0.1:
    return []
  examples = plan.records_per_update * plan.packing_factor
  return [
    f"an update has {plan.records_per_update} packed records, {examples:.1f} "
    f"examples, not {examples / plan.divisor:.0f}: a lower "
    "--examples_per_record would be nearer"
  ]


class PackedRecords:
  """An `input_pipeline.Source`: examples in records of `tokens` (S)."""

  rows_of_record = 1  # of `tokens` tokens each
  reads_first_tokens = False  # of its examples only, and no pooler

  def __init__(
    self,
    path: str,
    examples: Sequence,
    lengths: Sequence[int],
    records: list[list[int]],
    tokens: int,
    cut: int = 0,
  ):
    """`records` have the numbers of their examples; `cut` lost their end.

    `examples` have a `where` and `lengths`, in tokens. A subclass lays them out
    in `_columns`, a named tuple with `weights`.
    """
    if not examples:
      raise DataError(f"{path}: no examples")
    self.examples, self._path, self._cut = examples, path, cut
    self._lengths, self._records, self.tokens = lengths, records, tokens
    self.slots = max(map(len, self._records))
    self._columns: Any = None

  def __len__(self) -> int:
    return len(self._records)

  @property
  def packing_factor(self) -> float:
    """Mean number of examples in a record."""
    return len(self.examples) / len(self._records)

  def rows_of(self, examples: int) -> int:
    """The number of rows with about this number of examples; at least 1."""
    return max(1, min(len(self), round(examples / self.packing_factor)))

  def columns(self, numbers, epochs, progress, seed: int) -> dict:
    arrays = [*self._columns]
    tensors = later.tf.numpy_function(
      lambda numbers: [array[numbers] for array in arrays],
      [numbers],
      [array.dtype for array in arrays],
    )
    for tensor, array in zip(tensors, arrays, strict=True):
      tensor.set_shape([*numbers.shape, *array.shape[1:]])
    return dict(zip(self._columns._fields, tensors, strict=True))

  def batch(self, columns: dict, row_weights):
    """The columns' named tuple, where a row that only fills up weighs 0."""
    weights = columns["weights"] * row_weights[:, None]
    return type(self._columns)(**{**columns, "weights": weights})

  def weights(self, batch):
    """float [rows, 1]: the weights of each row's examples."""
    return later.tf.reduce_sum(batch.weights, axis=1, keepdims=True)

  def plan(self, config, ranks: int) -> training_plan.TrainingPlan:
    accumulation = config.num_accumulation_steps
    of_ranks = config.train_batch_size * ranks * (accumulation or 1)
    batch = config.global_batch_size or of_ranks
    if batch > len(self.examples):
      raise UserError(
        f"{self._path}: its {len(self.examples)} examples are fewer than one "
        f"update's {batch}: lower --train_batch_size or --global_batch_size"
      )
    # An update has whole rows, so about as many examples as are asked for.
    rows = max(1, round(batch / self.packing_factor))
    if rows < ranks:
      raise UserError(
        f"{self._path}: an update's {batch} examples are {rows} packed records "
        f"for {ranks} ranks: start fewer, or give a larger batch or "
        f"--examples_per_record={max(1, batch // ranks)}"
      )
    # Epochs are of examples; rounding to rows must not change how many there
    # are.
    steps = max(1, round(config.num_train_epochs * len(self.examples) / batch))
    micro = self.rows_of(config.train_batch_size)
    if not config.global_batch_size:
      # The flags settle the number of micro-batches, the packing their rows.
      share = -(-rows // ranks)
      micro, accumulation = -(-share // (accumulation or 1)), None
    return training_plan.resolve(
      ranks=ranks,
      records=len(self),
      packing_factor=self.packing_factor,
      train_batch_size=micro,
      global_batch_size=batch,
      num_train_steps=steps,
      num_warmup_steps=round(config.warmup_proportion * steps),
      num_decay_steps=config.num_decay_steps,
      num_accumulation_steps=accumulation,
      of_epochs=True,
    )

  def describe(self) -> dict:
    return {
      "files": [self._path],
      "contents": self.fingerprint(),
      "examples": len(self.examples),
      "records": len(self),
      "tokens_of_a_record": self.tokens,
    }

  def line(self) -> str:
    """Sizes, for the console."""
    lengths = self._lengths
    tokens = self.tokens * self.rows_of_record
    # Either mask numbers a token's example from 1.
    used = np.count_nonzero(self._columns.input_mask)
    padding = 1.0 - used / (len(self) * tokens)
    cut = f"; {self._cut:,} examples were longer and lost their end"
    return (
      f"{self._path}: {len(lengths):,} examples of {min(lengths)} to "
      f"{max(lengths)} tokens in {len(self):,} records of {tokens}, "
      f"{padding:.1%} padding{cut if self._cut else ''}"
    )

  def fingerprint(self) -> str:
    """Equal on ranks with equal data."""
    digest = hashlib.sha256()
    for array in self._columns:
      digest.update(array)
    checksum = digest.hexdigest()[:12]
    return f"{len(self.examples)} examples in {len(self)} rows ({checksum})"

  def locate(self, number: int) -> dict:
    examples = [self.examples[i].where for i in self._records[number]]
    return {"file": self._path, "examples": " and ".join(examples)}

  def explain(self, numbers: np.ndarray) -> None:
    """Nothing to explain: records in memory are not damaged."""


class PackedSource(PackedRecords):
  """Examples of up to two texts, each with targets of its own."""

  def __init__(
    self,
    path: str,
    examples: Sequence[Example],
    config,
    target_dtype=np.int32,
    cut: int = 0,
  ):
    lengths = [len(example.ids) for example in examples]
    # Rows are as short as the longest example allows, in multiples of 8: what
    # matmuls of GPUs prefer.
    least = _ROW_TOKENS if config.examples_per_record > 1 else 1
    longest = -(-max([*lengths, least]) // 8) * 8
    tokens = min(config.max_seq_length, longest)
    limits = packing.Limits(tokens, 0, config.examples_per_record)
    # The packer also counts predictions, which these examples have none of.
    nothing, rng = [0] * len(examples), np.random.default_rng(0)
    rows = packing.pack(lengths, nothing, limits, rng)
    super().__init__(path, examples, lengths, rows, tokens, cut)
    slots = (len(rows), self.slots)
    positions = np.zeros([3, len(examples)], np.int64)
    ids, mask, segments = np.zeros([3, len(rows), self.tokens], np.int32)
    weights = np.zeros(slots, np.float32)
    targets = np.zeros((*slots, len(examples[0].targets)), target_dtype)
    for r, members in enumerate(rows):
      # Token positions of an example are those of its row from `start` on; the
      # mask numbers the row's examples from 1.
      start = 0
      for e, number in enumerate(members):
        example, end = examples[number], start + lengths[number]
        ids[r, start:end] = example.ids
        segments[r, start:end] = example.segments
        mask[r, start:end] = e + 1
        weights[r, e] = example.weight
        targets[r, e] = example.targets
        positions[:, number] = r, e, start
        start = end
    model = task_file.binding(config)
    if model and not model.task.get("segment_ids", True):
      segments[:] = 0  # it never learned the second one
    # Where each example is, and its first token in the row: int [examples].
    self.record_of, self.slot_of, self.starts = positions
    self._columns = FinetuningBatch(ids, mask, segments, targets, weights)

  def of_examples(self, of_tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Each example's part of an array [rows, S, ...]; writing changes it."""
    firsts = zip(self.examples, self.record_of, self.starts, strict=True)
    for example, row, start in firsts:
      yield of_tokens[row, start : start + len(example.ids)]
