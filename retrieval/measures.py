"""What a ranking is worth: nDCG@10, MRR@10, recall@100 and MAP@100.

Definitions, ties and cutoffs are trec_eval's, so that figures compare with
BEIR's and MTEB's; tests hold them to pytrec_eval's numbers.
"""

import numpy as np

from retrieval import nearest
from retrieval.beir import Collection

Run = dict[str, dict[str, float]]  # query -> {document: score}
Results = dict[str, float]  # measure -> its mean over the queries

NDCG, MRR, RECALL, MAP = "ndcg@10", "mrr@10", "recall@100", "map@100"
DEPTH = 100  # documents of a ranking that a measure looks at


def ranking(scores: dict[str, float]) -> list[str]:
  """The documents, the best first; of equal ones the last by name, as there."""
  # trec_eval keeps scores as float32, so there are ties where it has them.
  order = lambda name: (np.float32(scores[name]), name.encode())
  return sorted(scores, key=order, reverse=True)


def of_query(ranked: list[str], judged: dict[str, int]) -> Results:
  """The measures of one query, from its ranking and {document: gain}."""
  gains = np.zeros(DEPTH)
  for rank, name in enumerate(ranked[:DEPTH]):
    gains[rank] = judged.get(name, 0)
  ideal = np.sort([*judged.values(), *[0] * 10])[::-1][:10]
  relevant = gains > 0
  known = np.count_nonzero([*judged.values()])
  if not known:
    return dict.fromkeys([NDCG, MRR, RECALL, MAP], 0.0)
  ranks = np.arange(1, DEPTH + 1)
  discount = 1 / np.log2(ranks[:10] + 1)
  reciprocal = (relevant / ranks)[:10].max()
  precision = np.cumsum(relevant) / ranks
  return {
    NDCG: float(gains[:10] @ discount / (ideal @ discount)),
    MRR: float(reciprocal),
    RECALL: float(relevant.sum() / known),
    MAP: float(precision[relevant].sum() / known),
  }


def evaluate(qrels: dict[str, dict[str, int]], run: Run) -> Results:
  """The means over all judged queries; one that has no ranking counts as 0.

  A document with the query's own id is left out, as BEIR does, where queries
  are documents.
  """
  sums = dict.fromkeys([NDCG, MRR, RECALL, MAP], 0.0)
  for query, judged in qrels.items():
    scores = dict(run.get(query, {}))
    scores.pop(query, None)
    for name, value in of_query(ranking(scores), judged).items():
      sums[name] += value / len(qrels)
  return sums


def run_of(
  collection: Collection, scores: np.ndarray, numbers: np.ndarray
) -> Run:
  """The run of scores and document numbers [queries, k], as of `top_k`."""
  names = [*collection.documents]
  run: Run = {}
  for query, row, best in zip(collection.queries, scores, numbers, strict=True):
    run[query] = {}
    for score, number in zip(row, best, strict=True):
      run[query][names[number]] = float(score)
  return run


def of_vectors(
  collection: Collection, queries: np.ndarray, documents: np.ndarray
) -> Results:
  """`evaluate` by cosine of vectors [queries, d] and [documents, d]."""
  # One more, because the query itself may be among them.
  best = nearest.top_k(queries, documents, DEPTH + 1)
  return evaluate(collection.qrels, run_of(collection, *best))
