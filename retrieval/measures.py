"""What a ranking is worth: nDCG@10, MRR@10 and recall@100.

Definitions, ties and cutoffs are trec_eval's, so that figures compare with
BEIR's and MTEB's; tests hold them to pytrec_eval's numbers.
"""

import numpy as np

from retrieval.beir import Collection

Results = dict[str, float]  # measure -> its mean over the queries

NDCG, MRR, RECALL = "ndcg@10", "mrr@10", "recall@100"
# Documents of a ranking that a measure looks at, and those to search for: the
# query itself may be among them.
DEPTH, SEARCHED = 100, 101


def of_query(ranked: list[str], judged: dict[str, int]) -> Results:
  """The measures of one query, from its ranking and {document: gain}."""
  gains = np.zeros(DEPTH)
  for rank, name in enumerate(ranked[:DEPTH]):
    gains[rank] = judged.get(name, 0)
  ideal = np.sort([*judged.values(), *[0] * 10])[::-1][:10]
  relevant = gains > 0
  known = np.count_nonzero([*judged.values()])
  if not known:
    return dict.fromkeys([NDCG, MRR, RECALL], 0.0)
  ranks = np.arange(1, DEPTH + 1)
  discount = 1 / np.log2(ranks[:10] + 1)
  return {
    NDCG: float(gains[:10] @ discount / (ideal @ discount)),
    MRR: float((relevant / ranks)[:10].max()),
    RECALL: float(relevant.sum() / known),
  }


def evaluate(
  collection: Collection, scores: np.ndarray, numbers: np.ndarray
) -> Results:
  """The means over all queries, of their best documents [queries, k].

  `scores` and `numbers` are as of `nearest.top_k`; one of -inf is no result. A
  document with the query's own id is left out, as BEIR does, where queries are
  documents, unless it is judged an answer.
  """
  names, queries = [*collection.documents], collection.queries
  sums = dict.fromkeys([NDCG, MRR, RECALL], 0.0)
  # trec_eval keeps scores as float32, so there are ties where it has them.
  scores = scores.astype(np.float32)
  for query, row, best in zip(queries, scores, numbers, strict=True):
    ranked, judged = [], collection.qrels[query]
    for score, number in zip(row, best, strict=True):
      is_itself = names[number] == query and not judged.get(query)
      if score > -np.inf and not is_itself:
        ranked.append((score, names[number].encode(), names[number]))
    # Of equal scores the last name is first, as there.
    in_order = [name for *_, name in sorted(ranked, reverse=True)]
    for name, value in of_query(in_order, judged).items():
      sums[name] += value / len(queries)
  return sums
