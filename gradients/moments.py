"""What optimizers share: slots, decay and bias correction.

`adamw`, `variable_rates` (LAMB) and `muon` have the rules of an update.
"""

import math
import re
from typing import Any, NamedTuple

from common.tensorflow_v1 import OPTIONAL_VARIABLES, tf
from gradients.layout import VariableLayout

# The graph's collection of all slots' variables.
SLOTS = "optimizer_slots"


def variable_name(variable) -> str:
  """A variable's name without ":0", also of one that is outside of graphs."""
  return variable.name.rpartition(":")[0]


def state(name: str, shape=(), dtype=tf.float32, initial=None) -> tf.Variable:
  """A variable of checkpoints that is not trained; at first 0 or `initial`."""
  initial = initial or tf.zeros_initializer()
  return tf.get_variable(name, shape, dtype, initial, trainable=False)


def optional_state(name: str, shape=(), initial=None) -> tf.Variable:
  """`state` of float32 that a checkpoint may lack."""
  variable = state(name, shape, initial=initial)
  tf.add_to_collection(OPTIONAL_VARIABLES, variable)
  return variable


class Slot(NamedTuple):
  """A tensor that an optimizer keeps of a variable."""

  variable: tf.Variable
  beta: str  # the setting by which it decays; "" for no bias correction
  correction: Any = 1.0  # 1 - beta^t at update t; 1 without bias correction


class Change(NamedTuple):
  """What an optimizer has for a variable's update."""

  gradient: tf.Tensor
  variable: tf.Variable
  slots: dict[str, Slot]
  decay: Any  # a float, or a Tensor of the variable's shape


class MomentOptimizer(tf.train.Optimizer):
  """Slots, decoupled weight decay and bias correction.

  A subclass declares the slots of each variable in `slots_of`, and has the
  rule, `_update`. For each weight NAME and each slot there is a float32
  variable NAME/SLOT of its shape, which starts at 0; checkpoints, ZeRO, tensor
  slicing and --dry_run follow from the declaration. With bias correction
  `applied_updates` counts the updates without those that were skipped.
  `trust_ratios` are factors of the variables' rates, of `VariableLayout.norm`'s
  shape, in the order of the last `apply_gradients`; or none.
  """

  has_trust_ratios = False

  def __init__(
    self,
    learning_rate,
    weight_decay_rate=0.0,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-6,
    exclude_from_weight_decay=None,
    name=None,
    bias_correction=False,
  ):
    """`exclude_from_weight_decay`: regular expressions, searched in names."""
    super().__init__(use_locking=False, name=name or type(self).__name__)
    self.learning_rate = learning_rate
    self.weight_decay_rate = weight_decay_rate
    self.beta_1 = beta_1
    self.beta_2 = beta_2
    self.epsilon = epsilon
    self.exclude_from_weight_decay = exclude_from_weight_decay
    self.bias_correction = bias_correction
    self.trust_ratios = []
    # Variable's name -> its slots by name. The base class has `_slots`, too.
    self._kept: dict[str, dict[str, Slot]] = {}
    self._applied_updates: Any = None

  def slots_of(self, variable) -> dict[str, str]:
    """A weight's slots: name -> the setting by which it decays, or "".

    It may depend on the weight's shape and name. `_update` sees which slots
    there are; ZeRO puts only weights of equal slots into one shard.
    """
    return {"adam_m": "beta_1", "adam_v": "beta_2"}  # google/bert's names

  def create_slots(self, variables, declared=None) -> list[dict[str, Slot]]:
    """The slots of each of `variables`, by name; made once.

    `declared` are of `slots_of`, for variables that are no weights. Call it
    outside of a `tf.cond` or function that applies gradients: what is made in
    there could not be initialised from outside.
    """
    declared = declared or [self.slots_of(variable) for variable in variables]
    names = [variable_name(variable) for variable in variables]
    with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
      if self.bias_correction and self._applied_updates is None:
        self._applied_updates = state("applied_updates", dtype=tf.int64)
      for name, variable, betas in zip(names, variables, declared, strict=True):
        if name in self._kept:
          continue
        self._kept[name] = {}
        for slot, beta in betas.items():
          tensor = state(f"{name}/{slot}", variable.shape.as_list())
          self._kept[name][slot] = Slot(tensor, beta)
          tf.add_to_collection(SLOTS, tensor)
    return [self._kept[name] for name in names]

  def apply_gradients(
    self, grads_and_vars, global_step=None, name=None, layout=None
  ):
    """As in google/bert, `global_step` is not advanced; no layout is whole."""
    pairs = [(g, v) for g, v in grads_and_vars if g is not None]
    kept = self._corrected(self.create_slots([v for _, v in pairs]))
    layout = layout or VariableLayout()
    self.trust_ratios = []
    changes = []
    for (gradient, variable), slots in zip(pairs, kept, strict=True):
      gradient = tf.convert_to_tensor(gradient)
      decay = layout.decay(self.decay_rate, variable)
      changes.append(Change(gradient, variable, slots, decay))
    updates = self._update_all(changes, layout)
    counted = tf.no_op()
    if self.bias_correction:
      with tf.control_dependencies(updates):
        counted = self._applied_updates.assign_add(1, read_value=False)
    return tf.group(*updates, counted, name=name)

  def _update_all(self, changes: list[Change], layout) -> list[tf.Operation]:
    return [self._update(*change, layout) for change in changes]

  def _update(self, gradient, variable, slots: dict, decay, layout):
    """The op that updates a variable; the arguments are of a `Change`."""
    raise NotImplementedError

  def _corrected(self, kept: list[dict[str, Slot]]) -> list[dict[str, Slot]]:
    """The slots with their bias corrections for update t = 1, 2, ..."""
    if not self.bias_correction:
      return kept
    t = tf.cast(tf.convert_to_tensor(self._applied_updates) + 1, tf.float32)
    by_beta: dict[str, Any] = {"": 1.0}
    corrected: list[dict[str, Slot]] = []
    for slots in kept:
      corrected.append({})
      for name, slot in slots.items():
        if slot.beta not in by_beta:
          beta = getattr(self, slot.beta)
          # -expm1(t log b) is 1 - b^t without the cancellation at b near 1.
          correction = -tf.math.expm1(t * math.log(beta)) if beta else 1.0
          by_beta[slot.beta] = correction
        corrected[-1][name] = slot._replace(correction=by_beta[slot.beta])
    return corrected

  def is_matrix(self, variable) -> bool:
    """Whether the rule needs a weight as a whole matrix, not its elements."""
    return False

  def is_one_program(self, layout) -> bool:
    """Whether XLA can compile the update of variables of a `layout`."""
    return True

  def decay_rate(self, variable) -> float:
    """The weight decay of a weight, 0 for those that are excluded."""
    name = variable_name(variable)
    for pattern in self.exclude_from_weight_decay or ():
      if re.search(pattern, name):
        return 0.0
    return self.weight_decay_rate


def assign_all(pairs) -> list[tf.Operation]:
  """Ops that give variables their values, of [(variable, value), ...]."""
  return [variable.assign(value, read_value=False) for variable, value in pairs]


def is_zero(decay) -> bool:
  """Whether a weight decay, a float or a tensor, is known to be 0."""
  return isinstance(decay, float) and decay == 0.0
