"""GLUE's metrics, by scikit-learn and SciPy. Arrays are [examples]."""

import numpy as np


def accuracy(targets, predicted) -> float:
  """Share of examples whose label is right."""
  return float(np.mean(targets == predicted))


def f1(targets, predicted) -> float:
  """Of label 1 if there are two labels, else the mean over labels."""
  from sklearn import metrics  # takes a second to load

  if max(targets.max(), predicted.max()) <= 1:
    return float(metrics.f1_score(targets, predicted, zero_division=0.0))
  return float(
    metrics.f1_score(targets, predicted, average="macro", zero_division=0.0)
  )


def matthews(targets, predicted) -> float:
  """Matthews correlation; 0 where all predictions are alike."""
  from sklearn import metrics

  return float(metrics.matthews_corrcoef(targets, predicted))


def pearson(targets, predicted) -> float:
  """Pearson correlation; 0 where it is not defined."""
  return _correlation("pearsonr", targets, predicted)


def spearman(targets, predicted) -> float:
  """Spearman's rank correlation; 0 where it is not defined."""
  return _correlation("spearmanr", targets, predicted)


def _correlation(name: str, targets, predicted) -> float:
  from scipy import stats

  if len(targets) < 2 or np.ptp(targets) == 0 or np.ptp(predicted) == 0:
    return 0.0
  return float(getattr(stats, name)(targets, predicted).statistic)


CLASSIFICATION = {
  "accuracy": accuracy,
  "f1": f1,
  "matthews": matthews,
  "pearson": pearson,
  "spearman": spearman,
}
REGRESSION = {"pearson", "spearman"}
