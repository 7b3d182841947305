"""Search by words, by the library bm25s: what vectors should be better than."""

import logging

import numpy as np

from common.errors import needing
from retrieval import measures
from retrieval.beir import Collection

# Chinese, Japanese and Korean put no spaces between words, so there a word is a
# character.
_NO_SPACES = "[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
_WORD = rf"(?u){_NO_SPACES}|(?:(?!{_NO_SPACES})\w)+"


def search(collection: Collection) -> tuple[np.ndarray, np.ndarray]:
  """Scores and numbers of each query's best documents, for `evaluate`.

  English stop words are left out and endings cut off, as in Anserini's
  figures for BEIR. UserError without the library.
  """
  with needing("search", "BM25"):
    import bm25s
    import Stemmer
  logging.getLogger("bm25s").setLevel(logging.WARNING)
  stem = Stemmer.Stemmer("english")

  def words(texts):
    return bm25s.tokenize(
      [*texts], token_pattern=_WORD, stopwords="en", stemmer=stem,
      show_progress=False,
    )  # fmt: skip

  index = bm25s.BM25()
  # Of documents without a word the mean length is 0.
  with np.errstate(invalid="ignore"):
    index.index(words(collection.documents.values()), show_progress=False)
  numbers, scores = index.retrieve(
    words(collection.queries.values()),
    k=min(measures.SEARCHED, len(collection.documents)),
    show_progress=False,
    backend_selection="numpy",
  )
  # A row is filled up with documents that have none of the words.
  return np.where(scores > 0, scores, -np.inf), numbers
