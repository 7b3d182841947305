"""The arithmetic of a model's matmuls, with which speeds are compared.

A dense layer y = x w takes 2 FLOPs for each of rows x width x units forward,
and twice that backward (dy w^T and x^T dy): 6 in all, as in Kaplan et al. 2020
(https://arxiv.org/abs/2001.08361, section 2.1). Attention counts all S x S
scores of a head, masked ones too, or those of blocks. The masked LM head has a
dense layer at all P positions of a record, and logits at those to predict: not
at the few others that the step computes to have few shapes. Embeddings, what
lies between matmuls, the optimizer and what --recompute computes again do not
count.
"""

import collections
from typing import NamedTuple

import mixed_precision
from common.tensorflow_v1 import tf
from config import execution
from config.bert_config import BertConfig
from config.pretraining import PretrainingConfig
from model import attention
from model.tasks import BY_KIND
from model.weights import QUERY, dense_layers


class Matmul(NamedTuple):
  """`times` products [batch, m, k] x [batch, k, n]."""

  times: int
  batch: int
  m: int
  k: int
  n: int
  transpose: str  # "", "a" or "b": which factor lies transposed in memory
  dtype: tf.DType

  @property
  def flops(self) -> float:
    """FLOPs of one product."""
    return 2.0 * self.batch * self.m * self.k * self.n


def total(matmuls: list) -> float:
  """FLOPs of all products."""
  return sum(matmul.times * matmul.flops for matmul in matmuls)


def dense(count: int, rows: int, width: int, units: int, dtype) -> list:
  """`count` layers [rows, width] -> [rows, units], forward and backward."""
  return [
    Matmul(count, 1, rows, width, units, "", dtype),
    Matmul(count, 1, rows, units, width, "b", dtype),
    Matmul(count, 1, width, rows, units, "a", dtype),
  ]


def encoder(
  bert: BertConfig, policy, rows: int, tokens: int, read: int = 0
) -> list:
  """BERT's layers, forward and backward; `tokens` is S, with padding.

  The last layer is computed at `read` positions of each row; 0: at all of them.
  """
  times: collections.Counter[Matmul] = collections.Counter()
  last = bert.num_hidden_layers - 1
  for number in range(bert.num_hidden_layers):
    queries = read if read and number == last else tokens
    for matmul in _layer(bert, policy, number, rows, tokens, queries):
      times[matmul._replace(times=1)] += matmul.times
  return [matmul._replace(times=n) for matmul, n in times.items()]


def _layer(
  bert: BertConfig, policy, number: int, rows: int, tokens: int, queries: int
) -> list:
  """Layer `number`, of which each row computes `queries` of its tokens."""
  matmuls = []
  block = attention.block_of(bert, tokens) if bert.is_local(number) else None
  for layer in dense_layers(bert):
    # Blocks have all tokens as queries, of which some are read.
    is_of_all = layer.of_all_tokens or (block and layer.name == QUERY)
    of_row = tokens if is_of_all else queries
    dtype = getattr(policy, layer.part)
    matmuls += dense(1, rows * of_row, layer.inputs, layer.units, dtype)
  size, dtype = bert.head_size, policy.attention
  # For each head of a row: matrices of scores, their rows and columns.
  count, keys = 1, tokens
  if block:
    count, queries, keys = -(-tokens // block), block, 3 * block
  count *= rows * bert.num_attention_heads
  return [
    *matmuls,
    # scores = Q K^T; d probs = d context V^T
    Matmul(2, count, queries, size, keys, "b", dtype),
    # context = probs V; d Q = d scores K
    Matmul(2, count, queries, keys, size, "", dtype),
    # d V = probs^T d context; d K = d scores^T Q
    Matmul(2, count, keys, queries, size, "a", dtype),
  ]


def features(bert: BertConfig, policy, rows: int) -> list:
  """`modeling.head_features` of `rows` tokens or examples."""
  layers = 1 if bert.shares_transform else 0
  return dense(layers, rows, bert.hidden_size, bert.hidden_size, policy.heads)


def pooled(
  bert: BertConfig, policy, rows: int, tokens: int, slots: int, classes: int
):
  """The pooler and a classification of rows of `slots` examples."""
  hidden, layers = bert.hidden_size, 1 if bert.has_pooler else 0
  means, examples = 1 if bert.pools_all_tokens else 0, rows * slots
  return [
    Matmul(means, rows, slots, tokens, hidden, "", policy.losses),
    Matmul(means, rows, tokens, slots, hidden, "a", policy.losses),
    *dense(layers, examples, hidden, hidden, policy.heads),
    *features(bert, policy, examples),
    *dense(1, examples, hidden, classes, policy.heads),
  ]


def finetuning(
  bert: BertConfig, policy, kind: str, classes: int, rows: int, source
) -> list:
  """A task on `rows` rows of a `packed.PackedSource`."""
  tokens, slots = source.tokens, source.slots
  head = BY_KIND[kind]
  if head.reads_pooled:
    read = 0 if bert.pools_all_tokens else slots
    of_head = pooled(bert, policy, rows, tokens, slots, classes)
  else:
    read, count = 0, rows * tokens if classes else 0
    if source.reads_first_tokens:
      read = min(tokens, slots)
    dtype = policy.losses if head.full_precision else policy.heads
    of_head = features(bert, policy, count)
    of_head += dense(1, count, bert.hidden_size, classes, dtype)
  return [*encoder(bert, policy, rows, tokens, read), *of_head]


def of_run(
  config: PretrainingConfig, rows: int, shape, masked: int | None = None
) -> list:
  """`modeling.pretraining_model` on `rows` records of `shape`, a `RecordShape`.

  With `masked` tokens to predict; None: as many as there is room for.
  """
  bert, policy = config.stage_bert, mixed_precision.policy_of(config)
  most = rows * shape.max_predictions_per_seq
  if masked is None or config.xla not in execution.VARIED:
    masked = most  # all positions have logits
  classes = config.sampled_softmax or bert.vocab_size
  firsts = shape.examples_per_record if shape.next_sentence else 0
  read, hidden = shape.max_predictions_per_seq + firsts, bert.hidden_size
  if shape.next_sentence and bert.pools_all_tokens:
    read = 0
  matmuls = encoder(bert, policy, rows, shape.max_seq_length, read)
  if bert.mlm_head:
    matmuls += dense(1, most, hidden, hidden, policy.heads)
  matmuls += dense(1, masked, hidden, classes, policy.heads)
  if shape.next_sentence:
    matmuls += pooled(bert, policy, rows, shape.max_seq_length, firsts, 2)
  return matmuls
