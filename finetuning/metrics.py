"""GLUE's metrics, shares of 1 or correlations. Arrays are [examples]."""

import functools

import numpy as np

THRESHOLD = 0.5  # of a label, transformers' choice: a logit of 0


def accuracy(targets, predicted) -> float:
  """Share of examples whose label is right."""
  return float(np.mean(targets == predicted))


def _of_sklearn(name: str, targets, predicted, **options) -> float:
  from sklearn import metrics  # takes a second to load

  return float(getattr(metrics, name)(targets, predicted, **options))


def _correlation(name: str, targets, predicted) -> float:
  """SciPy's; 0 where it is not defined."""
  from scipy import stats

  # SciPy warns and gives NaN, which no best checkpoint can be chosen by.
  varies = len(targets) > 1 and np.ptp(targets) and np.ptp(predicted)
  if not varies or not np.isfinite(varies):
    return 0.0
  return float(getattr(stats, name)(targets, predicted).statistic)


# F1 of label 1, the second of two.
f1 = functools.partial(_of_sklearn, "f1_score", zero_division=0.0)
# 0 where all predictions are alike.
matthews = functools.partial(_of_sklearn, "matthews_corrcoef")
pearson = functools.partial(_correlation, "pearsonr")
spearman = functools.partial(_correlation, "spearmanr")

OF_LABELS = {"accuracy": accuracy, "f1": f1, "matthews": matthews}
OF_NUMBERS = {"pearson": pearson, "spearman": spearman}
# Where an example may have several labels: 0 or 1 by [examples, labels].
OF_SETS = {}
for _average in ("micro", "macro", "samples"):
  OF_SETS[f"f1_{_average}"] = functools.partial(f1, average=_average)


def metric(name: str, labels: int):
  """A function (targets, predicted) -> float for a task of `labels` labels."""
  if name == "f1" and labels > 2:
    return functools.partial(f1, average="macro")
  return (OF_LABELS | OF_NUMBERS | OF_SETS)[name]


def best_threshold(targets, shares) -> float:
  """The share above which labels count, for the highest F1 over all of them.

  targets and shares: [examples, labels]. It is halfway between two neighbouring
  shares, the higher of equally good ones; THRESHOLD if they are no numbers.
  """
  order = np.argsort(-shares, axis=None, kind="stable")
  falling, right = shares.ravel()[order], targets.ravel()[order]
  following = np.append(falling[1:], 0.0)
  hits = np.cumsum(right)
  # Of the labels up to each one in this order, if they all count.
  scores = 2.0 * hits / (np.arange(1, len(hits) + 1) + hits[-1])
  scores[falling == following] = 0.0  # nothing lies between them
  best = np.argmax(scores)
  return float(np.nan_to_num((falling + following)[best] / 2, nan=THRESHOLD))
