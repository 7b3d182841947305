"""Pseudo-log-likelihoods of sentences by a masked language model.

The sum of the log-probabilities of a sentence's tokens, without [CLS] and
[SEP], each where it is masked (https://arxiv.org/abs/1910.14659). Here the
later pieces of its word are masked with it, so that a word is not given away
by its own end (Kauf and Ivanova, https://arxiv.org/abs/2305.10588).
"""

import functools
import unicodedata
from collections.abc import Sequence

import numpy as np

from common.console import Progress
from common.errors import UserError
from common.tensorflow_v1 import tf
from interop import inference
from interop.heads import MASKED_LM
from model import tasks
from text_encoders.base import Encoder
from text_encoders.characters import has_chinese

_TOKENS = 4096  # in one run of the graph


@functools.lru_cache(1)
def words_alone(encoder: Encoder) -> np.ndarray:
  """bool [V]: tokens that are a word each without a mark: signs, Chinese.

  Where only spaces are marked, tokens without one before them are not. ##
  marks all tokens that continue a word.
  """
  alone = np.zeros(len(encoder.tokens), bool)
  if not encoder.marks_spaces:
    return alone
  for number, text in enumerate(encoder.texts):
    letters = text.lstrip(encoder.mark)
    signs = sum(unicodedata.category(char)[0] in "PS" for char in letters)
    alone[number] = has_chinese(letters) or 0 < signs == len(letters)
  return alone


def masked_copies(
  rows: np.ndarray, encoder: Encoder, within_word: bool = True
) -> np.ndarray:
  """int32 [m, n, S]: copy p of each row is masked for the sentence's token p.

  `rows` are int32 [m, S], of sentences with [CLS] and [SEP].
  """
  before, after = encoder.template(1)
  positions = np.arange(rows.shape[1])
  alone = words_alone(encoder)[rows]
  continues = encoder.is_continuation[rows]
  if encoder.marks_spaces:
    # Where a word begins with an unknown piece, its mark is the piece before.
    continues |= rows == encoder.unk_id
  begins = ~continues | alone | (not within_word)
  begins[:, 1:] |= alone[:, :-1]
  # int [m, S]: where the first word at or after each position begins.
  words = np.where(begins, positions, len(positions))
  words = np.minimum.accumulate(words[:, ::-1], axis=1)[:, ::-1]
  words = np.pad(words, ((0, 0), (0, 1)), constant_values=len(positions))
  sentence = slice(len(before), len(positions) - len(after))
  scored = positions[sentence, np.newaxis]
  # A copy hides the scored token and the later pieces of its word.
  hidden = (positions >= scored) & (positions < words[:, scored + 1])
  return np.where(hidden, np.int32(encoder.mask_id), rows[:, np.newaxis])


def batches(lengths: np.ndarray) -> list[np.ndarray]:
  """The numbers of sentences that are scored together, from long to short.

  They are of one length, so that there is no padding, and a function of all
  `lengths`, int [n], alone: a sentence's score does not depend on ranks.
  """
  # From long to short, so that what does not fit in memory fails at once.
  order = np.argsort(-lengths, kind="stable")
  together = []
  for same in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
    length = int(lengths[same[0]])
    at_once = max(1, _TOKENS // (length * (length + 2)))
    together += np.split(same, range(at_once, len(same), at_once))
  return together


class Scorer:
  """Scores sentences by the masked LM head of an open model."""

  def __init__(
    self, model: inference.Model, encoder: Encoder, within_word: bool = True
  ):
    """`UserError` if the model has no such head."""
    self._signature = model.signature(MASKED_LM)
    self._session, self._encoder = model.session, encoder
    self._within_word = within_word
    with model.session.graph.as_default() as graph:
      # Only the labels' numbers leave the graph, not those of all classes.
      self._labels = tf.placeholder(tf.int32, [None, None])
      name = self._signature.outputs["log_probs"].name
      log_probs = graph.get_tensor_by_name(name)
      self._of_labels = tf.gather(log_probs, self._labels, batch_dims=2)

  def score(self, sentences: Sequence[np.ndarray], comm) -> np.ndarray:
    """float64 [sentences], for int32 [n] each; the same on all ranks.

    Each rank scores a share of `batches`. All call it.
    """
    lengths = np.array(list(map(len, sentences)))
    work = lengths * (lengths + 2)  # tokens of all copies
    total, scores, done = int(work.sum()), np.zeros(len(sentences)), 0
    with Progress("scoring", total, "tokens", comm=comm) as bar:
      for numbers in batches(lengths)[comm.rank :: comm.size]:
        scores[numbers] = self._batch([sentences[n] for n in numbers])
        done += int(work[numbers].sum())
        bar.at(min(done * comm.size, total))
    # Each rank has 0 for the sentences of others.
    scores = comm.gather(scores).sum(axis=0)
    if not np.isfinite(scores).all():
      raise UserError("the model's log-probabilities are not finite")
    return scores

  def _batch(self, sentences: Sequence[np.ndarray]) -> np.ndarray:
    """float64 [m], for m sentences of one length."""
    labels = np.stack(sentences)
    m, n = labels.shape
    before, after = self._encoder.template(1)
    rows = np.concatenate(
      [np.tile(before, (m, 1)), labels, np.tile(after, (m, 1))], axis=1
    )
    copies = masked_copies(rows, self._encoder, self._within_word)
    copies = copies.reshape(-1, rows.shape[1])
    positions = np.tile(len(before) + np.arange(n), m)[:, np.newaxis]
    labels = labels.reshape(-1, 1)
    at_once = max(1, _TOKENS // (n + 2))  # a sentence may be too long for one
    log_probs = []
    for start in range(0, len(copies), at_once):
      part = slice(start, start + at_once)
      ids = copies[part]
      arrays = {
        "input_ids": ids,
        "input_mask": np.ones_like(ids),
        "segment_ids": np.zeros_like(ids),
        tasks.POSITIONS: positions[part],
      }
      feed = {self._labels: labels[part]}
      for name, info in self._signature.inputs.items():
        feed[info.name] = arrays[name]
      log_probs.append(self._session.run(self._of_labels, feed))
    return np.concatenate(log_probs).reshape(m, n).sum(1, dtype=np.float64)
