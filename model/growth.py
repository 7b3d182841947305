"""A run's state with the tensors of a larger model, made of a smaller one's.

Depth: each layer is a copy of one that there was. Width: unit u is a copy of
unit u mod W of the W that there were, so heads stay whole. The order of units
has no meaning: to begin at the centre, as ModernBERT does
(https://arxiv.org/abs/2412.13663), makes copies of other ones, no other model.
Copies of a unit share its weights in what sums over units, so that twice the
width computes the same (Net2Net, https://arxiv.org/abs/1511.05641). The shares
are unequal: with equal ones copies would have equal gradients, and never differ
(LEMON, https://arxiv.org/abs/2310.07999).

The optimizer's state grows as gradients of the larger model would have made it
(https://arxiv.org/abs/2203.06211): new moments would begin at 0 in the middle
of a run, where no bias correction makes up for that.
"""

import re
import zlib
from collections.abc import Mapping

import numpy as np

from config.bert_config import BertConfig
from config.stages import Growth
from model import weights

# Of which power of the gradient a slot is, by its name's ending. Others are
# like their weight.
_POWERS = {"m": 1, "error": 1, "v": 2}
_LAYER = re.compile(r"(?<=/encoder/layer_)\d+")


def layers(growth: Growth) -> list[int]:
  """The layer of the smaller model that each of the larger one is a copy of.

  "stack" repeats all layers in order, the others each beside itself. Layers of
  local attention are copies of such layers, if there are any.
  """
  small, large, method = growth
  sources = [0] * large.num_hidden_layers
  for is_local in (False, True):
    old, new = _of_kind(small, is_local), _of_kind(large, is_local)
    old = old or list(range(small.num_hidden_layers))
    for rank, layer in enumerate(new):
      at = rank * len(old) // len(new)
      sources[layer] = old[rank % len(old) if method == "stack" else at]
  return sources


def _of_kind(bert: BertConfig, is_local: bool) -> list[int]:
  numbers = range(bert.num_hidden_layers)
  return [n for n in numbers if bert.is_local(n) == is_local]


class Grown:
  """A state by name, like a `Checkpoint`, with the larger model's tensors."""

  def __init__(self, values, wanted: Mapping, growth: Growth):
    """`values` by name; `wanted`: the shapes of the larger model's state."""
    self.path = getattr(values, "path", "")
    self.shapes: dict[str, list[int]] = {}
    self._values, self._growth = values, growth
    self._sources: dict[str, str] = {}
    self._weights = {weight.name for weight in weights.weights(growth.large)}
    shapes = getattr(values, "shapes", values)  # of a checkpoint; in memory
    copies = layers(growth)
    for name, shape in wanted.items():
      source = self._source(name, copies)
      if source in shapes:
        there = list(getattr(shapes[source], "shape", shapes[source]))
        # Only the model's tensors grow; what else differs is refused.
        grows = self._parts(name)[0] and np.all(np.less_equal(there, shape))
        self.shapes[name] = shape if grows else there
        self._sources[name] = source

  def __getitem__(self, name: str) -> np.ndarray:
    value = np.asarray(self._values[self._sources[name]])
    shape = self.shapes[name]
    if list(value.shape) == shape:
      return value
    weight, slot = self._parts(name)
    summed = self._summed_axis(weight)
    power = _POWERS.get(slot.rpartition("_")[2], 0)
    added = np.subtract(shape, value.shape)
    grown = np.pad(value, np.stack([0 * added, added], 1), "wrap")
    random = np.random.default_rng(zlib.crc32(weight.encode()))
    for axis, units in enumerate(value.shape):
      # Copies of a unit share a weight that is summed over them, and in other
      # axes its gradient, since the sum is over what they compute.
      if power and axis != summed:
        grown = grown * _shares(np.ones(shape), axis, units) ** power
      elif not power and axis == summed:
        grown = grown * _shares(random.uniform(0.5, 1.5, shape), axis, units)
    return grown.astype(value.dtype)

  def _source(self, name: str, copies: list[int]) -> str:
    """The smaller model's tensor of which one is a copy."""
    layer = _LAYER.search(name)
    if not layer:
      return name
    number, (small, large, _) = int(layer[0]), self._growth
    source = copies[number]
    if large.pre_layer_norm and f"layer_{number}/output/LayerNorm/" in name:
      # The next layer reads through it; through the last one heads do.
      is_last = number + 1 == large.num_hidden_layers
      source = small.num_hidden_layers if is_last else copies[number + 1]
      if source == 0:
        return name.replace(f"encoder/layer_{number}/output", "embeddings")
      source -= 1
    return _LAYER.sub(str(source), name)

  def _parts(self, name: str) -> tuple[str, str]:
    """A weight's name and its slot's; "" for neither."""
    weight, slot = name, ""
    if name not in self._weights:
      weight, _, slot = name.rpartition("/")
    return (weight, slot) if weight in self._weights else ("", "")

  def _summed_axis(self, weight: str) -> int | None:
    """The axis of the units that a matmul with a weight sums over."""
    large = self._growth.large
    # Word embeddings are summed over, but also read: so what scales the numbers
    # that they are multiplied by is shared, for other heads that read it, too.
    is_scale = weight.startswith("cls/predictions/transform/LayerNorm/")
    is_tied = large.tie_word_embeddings
    if weight.endswith("/output_weights"):
      return None if is_tied and large.shares_transform else 1
    return 0 if weight.endswith("/kernel") or (is_scale and is_tied) else None


def _shares(parts: np.ndarray, axis: int, units: int) -> np.ndarray:
  """`parts` of 1: each over the sum of those of all copies of its unit."""
  copied = np.arange(parts.shape[axis]) % units
  sums = np.zeros_like(parts)
  np.add.at(sums.swapaxes(0, axis), copied, parts.swapaxes(0, axis))
  return parts / np.take(sums, copied, axis)
