"""DeepSpeed-style JSON as flags: a file's fields, under the flags' names.

  {
    "train_batch_size": 65536,
    "train_micro_batch_size_per_gpu": 64,
    "optimizer": {"type": "Lamb", "params": {"lr": 11e-3}},
    "scheduler": {"type": "warmup_exp_decay_exp",
                  "params": {"total_num_steps": 7500}},
    "fp16": {"enabled": true}
  }

A field that is neither honoured nor off is an error. What a file leaves out
keeps the flag's default, not DeepSpeed's. Steps count global batches. A flag on
the command line wins over its field, and over fields that mean nothing then.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from common import json_files
from common.errors import UserError
from common.settings import settings_of
from config import lr_schedule, precision

OPTIMIZER_TYPES = {"Adam": "adamw", "AdamW": "adamw", "Lamb": "lamb"}

_WARMUP_SHARE = "warmup_proportion"  # of num_train_steps; no flag
# Fields that no setting names: (form, flag of that value; "" is for `_flags`).
_FIELDS: dict[str, tuple[Any, str]] = {
  "optimizer.type": (tuple(OPTIMIZER_TYPES), ""),
  "optimizer.params.betas": ([float], ""),
  "scheduler.type": (tuple(lr_schedule.SCHEDULES), "lr_schedule"),
  "scheduler.params.warmup_proportion": (float, _WARMUP_SHARE),
  "fp16.enabled": (bool, ""),
  "bf16.enabled": (bool, ""),
  "fp16.initial_scale_power": (range(127), ""),  # powers of two in float32
}
_LARGEST = 1 << 62  # of a number: JSON has no limits
# Flags in units of global batches.
_COUNTED = (
  "train_batch_size", "num_accumulation_steps", "num_train_steps",
  "num_warmup_steps", "lr_decay_steps",
)  # fmt: skip


def flags_of(kind: type, path: str, present: dict | None = None) -> dict:
  """The values that a JSON file gives to flags, by the flags' names.

  The settings of dataclass `kind` name the JSON's fields. Flags of the command
  line, `present`, win and are left out. `UserError` names a wrong field.
  """
  present = present or {}
  try:
    values, field_of = _read(kind, path)
    _settle_steps(values, field_of, present)
  except (OSError, ValueError) as e:
    raise UserError(f"--config_json={path}: {e}") from e
  for flag in _meaningless(values, present):
    values.pop(flag, None)
  return {flag: values[flag] for flag in values if flag not in present}


def _read(kind: type, path: str) -> tuple[dict, dict]:
  """Values by flag, and the field that set each; ValueError names a field."""
  with open(path, "rb") as f:
    fields = dict(_leaves(json_files.parse(f.read())))
  known: dict[str, tuple] = {**_FIELDS}
  for setting in settings_of(kind):
    known |= dict.fromkeys(setting.json, (setting.kind, setting.name))
  # DeepSpeed's other optimizers know no trust ratio.
  if fields.get("optimizer.type") != "Lamb":
    del known["optimizer.params.max_coeff"], known["optimizer.params.min_coeff"]
  values: dict[str, Any] = {}
  field_of: dict[str, str] = {}
  for field, value in fields.items():
    if field not in known:
      if not value:
        continue  # off: it asks for nothing that is not done
      section = field.rpartition(".")[0]
      nearest = [name for name in known if name.rpartition(".")[0] == section]
      raise ValueError(
        f"{field} is not honoured here; known are "
        f"{', '.join(sorted(nearest or known))}"
      )
    form, flag = known[field]
    json_files.expect(value, form, field)
    if type(value) in (int, float) and not abs(value) <= _LARGEST:
      raise ValueError(f"{field} is {value}, not a number up to {_LARGEST}")
    # Two fields may set one flag, if they agree on it.
    meant = {flag: value} if flag else _flags(field, value)
    for name, meaning in meant.items():
      if values.setdefault(name, meaning) != meaning:
        raise ValueError(
          f"{field} is {value!r}, but {field_of[name]} is {values[name]!r}: "
          "they mean the same, give one"
        )
      field_of.setdefault(name, field)
  return values, field_of


def _settle_steps(values: dict, field_of: dict, present: dict) -> None:
  """Turns the warm-up's share into steps, which must be of a known batch."""
  counted = [flag for flag in _COUNTED if flag in values]
  if counted and "global_batch_size" not in {**values, **present}:
    raise ValueError(
      f"train_batch_size is missing beside {field_of[counted[0]]}: steps count "
      "global batches, so it must say how large they are"
    )
  share = values.pop(_WARMUP_SHARE, None)
  if share is None or "num_warmup_steps" in present:
    return
  total = {**values, **present}.get("num_train_steps")
  is_alone = "num_warmup_steps" not in values
  if total is None or not (is_alone and 0.0 <= share <= 1.0):
    raise ValueError(
      f"{field_of[_WARMUP_SHARE]} is {share}: it must be in [0, 1] and needs "
      "total_num_steps, or --num_train_steps, and no warmup_num_steps"
    )
  # Rounded first: 0.1 of 30 steps are 3, not 4.
  values["num_warmup_steps"] = math.ceil(round(share * total, 6))


def _leaves(value, field: str = "") -> Iterator[tuple[str, Any]]:
  """The fields of nested objects that are not off: ("section.key", value)."""
  # A null is off, and so is all of a section that is not enabled or of stage 0.
  if isinstance(value, dict):
    if field and (value.get("enabled") is False or value.get("stage") == 0):
      return
    for key, inner in value.items():
      yield from _leaves(inner, f"{field}.{key}" if field else key)
  elif value is not None:
    yield field or "it", value


def _flags(field: str, value) -> dict:
  """What a field means that is not one flag's value."""
  if field == "optimizer.type":
    return {"optimizer": OPTIMIZER_TYPES[value]}
  if field == "fp16.initial_scale_power":
    return {"initial_loss_scale": 2.0**value}
  if field.endswith(".enabled"):
    return {"precision": field.removesuffix(".enabled")}
  # What is left is optimizer.params.betas.
  if len(value) != 2 or max(value) > 1:
    raise ValueError(f"{field} is {value}, not a list of two numbers up to 1")
  return {"beta_1": value[0], "beta_2": value[1]}


def _meaningless(values: dict, present: dict) -> list[str]:
  """Flags whose values lose their meaning by others on the command line."""

  def overruled(*flags: str) -> bool:
    return any(f in present and present[f] != values.get(f) for f in flags)

  # A field that went with another value must not refuse the command's own.
  flags = []
  if overruled("precision", "precision_policy", "fp16_allreduce"):
    types = precision.types_of_parts(
      present.get("precision", values.get("precision")) or "fp32",
      present.get("precision_policy") or (),
    )
    if not ("fp16" in types.values() or present.get("fp16_allreduce")):
      fields = dataclasses.fields(precision.LossScaleConfig)
      flags += [field.name for field in fields]
  if overruled("lr_schedule"):
    flags.append("lr_power")
  if overruled("global_batch_size", "train_batch_size"):
    flags.append("num_accumulation_steps")
  return flags
