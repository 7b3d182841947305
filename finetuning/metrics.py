"""GLUE's metrics, shares of 1 or correlations. Arrays are [examples]."""

import functools

import numpy as np


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
  if len(targets) < 2 or np.ptp(targets) == 0 or np.ptp(predicted) == 0:
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


def metric(name: str, labels: int):
  """A function (targets, predicted) -> float for a task of `labels` labels."""
  if name == "f1" and labels > 2:
    return functools.partial(f1, average="macro")
  return (OF_LABELS | OF_NUMBERS)[name]
