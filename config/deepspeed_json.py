"""DeepSpeed-style JSON as flags: a file's fields, under the flags' names.

  {
    "train_batch_size": 65536,
    "train_micro_batch_size_per_gpu": 64,
    "optimizer": {"type": "Lamb", "params": {"lr": 11e-3}},
    "scheduler": {"type": "warmup_exp_decay_exp",
                  "params": {"total_num_steps": 7500}},
    "fp16": {"enabled": true}
  }

A field that is not honoured is an error. What a file leaves out keeps the
flag's default, not DeepSpeed's. Steps count global batches. A flag on the
command line wins over its field, and over fields that it leaves without meaning
(`_Reader.settle`).
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import mixed_precision
from common import json_files
from common.errors import UserError
from common.settings import settings_of
from gradients import lr_schedule

OPTIMIZER_TYPES = {"Adam": "adamw", "AdamW": "adamw", "Lamb": "lamb"}

_NUMBER, _COUNT = "a number", "an integer"
_LARGEST = {_NUMBER: 1e300, _COUNT: 1 << 62}  # JSON has no limits
_LARGEST_POWER = 126  # of two, in float32
_BOOL, _PAIR = "true or false", "a list of two numbers"
_WANTED = {float: _NUMBER, int: _COUNT, bool: _BOOL}

# Flags in units of global batches.
_COUNTED = {
  "train_batch_size", "num_accumulation_steps", "num_train_steps",
  "num_warmup_steps", "lr_decay_steps",
}  # fmt: skip

_LAMB_ONLY = ("optimizer.params.max_coeff", "optimizer.params.min_coeff")
# Flags are calculated from these fields; settings name the others.
_CALCULATED = {
  "optimizer.params.betas": _PAIR,
  "scheduler.params.warmup_proportion": _NUMBER,
  "fp16.initial_scale_power": _NUMBER,
  "fp16.enabled": _BOOL,
  "bf16.enabled": _BOOL,
}


def flags_of(kind: type, path: str, given: dict | None = None) -> dict:
  """The values that a JSON file gives to flags, by the flags' names.

  The settings of dataclass `kind` name the JSON's fields. Flags of the command
  line, `given`, win and are left out.
  """
  try:
    with open(path, "rb") as f:
      config = json_files.parse(f.read())
  except (OSError, ValueError) as e:
    raise UserError(f"--config_json={path}: not readable as JSON: {e}") from e
  reader = _Reader(kind, path, given or {})
  top = reader.object(config, "").items()
  reader.read({k: v for k, v in top if k not in _SECTIONS}, "")
  for section, read in _SECTIONS.items():
    if section in config:
      read(reader, reader.object(config[section], section), section)
  reader.settle()
  return {n: v for n, v in reader.values.items() if n not in reader.given}


class _Reader:
  def __init__(self, kind: type, path: str, given: dict):
    self.path, self.given = path, given
    # Field -> (what it must be, the flag).
    self.known = {field: (want, field) for field, want in _CALCULATED.items()}
    for one in settings_of(kind):
      for field in one.json:
        self.known[field] = _WANTED[one.kind], one.name
    # By flag; a value of _CALCULATED is under its field until it is a flag's.
    self.values: dict[str, Any] = {}
    self._from: dict[str, str] = {}  # flag -> the field that set it

  def error(self, field: str, reason: str) -> UserError:
    return UserError(f"--config_json={self.path}: {field or 'it'} {reason}")

  def object(self, value, field: str) -> dict:
    if not isinstance(value, dict):
      raise self.error(field, f"is {value!r}, not an object")
    return value

  def read(self, content: dict, section: str) -> None:
    for key, value in content.items():
      field = f"{section}.{key}" if section else key
      if field not in self.known:
        paths = [f.rpartition(".") for f in (*self.known, *_SECTIONS)]
        names = sorted(name for of, _, name in paths if of == section)
        raise self.error(
          field, f"is not honoured here; known are {', '.join(names)}"
        )
      want, flag = self.known[field]
      if not _fits(value, want):
        raise self.error(field, f"is {value!r}, not {want}")
      self.put(flag, value, field)

  def put(self, flag: str, value, field: str) -> None:
    """Sets a flag that no other field has set to something else."""
    if self.values.get(flag, value) != value:
      raise self.error(
        field,
        f"is {value!r}, but {self._from[flag]} is {self.values[flag]!r}: they "
        "mean the same, give one",
      )
    self.values[flag] = value
    self._from[flag] = field

  def typed(self, content: dict, section: str, types) -> str:
    """Reads {"type": one of `types`, "params": {...}}; returns the type."""
    extra = sorted(set(content) - {"type", "params"})
    if extra:
      raise self.error(f"{section}.{extra[0]}", "is not honoured")
    kind: Any = content.get("type")
    if kind not in list(types):  # may be of any type
      raise self.error(
        f"{section}.type", f"is {kind!r}, not one of {', '.join(types)}"
      )
    if section == "optimizer" and kind != "Lamb":
      self.known = {f: w for f, w in self.known.items() if f not in _LAMB_ONLY}
    field = f"{section}.params"
    self.read(self.object(content.get("params", {}), field), field)
    return kind

  def optimizer(self, content: dict, section: str) -> None:
    kind = self.typed(content, section, OPTIMIZER_TYPES)
    self.values["optimizer"] = OPTIMIZER_TYPES[kind]
    if betas := self.values.pop("optimizer.params.betas", None):
      self.values["beta_1"], self.values["beta_2"] = betas

  def scheduler(self, content: dict, section: str) -> None:
    self.values["lr_schedule"] = self.typed(
      content, section, lr_schedule.SCHEDULES
    )
    field = "scheduler.params.warmup_proportion"
    proportion = self.values.pop(field, None)
    if proportion is None or "num_warmup_steps" in self.given:
      return
    total = self.resolved("num_train_steps")
    if total is None or not 0.0 <= proportion <= 1.0:
      raise self.error(
        field,
        f"is {proportion}: it must be in [0, 1] and needs total_num_steps, or "
        "--num_train_steps",
      )
    steps = math.ceil(round(proportion * total, 6))
    self.put("num_warmup_steps", steps, field)

  def precision(self, content: dict, section: str) -> None:
    """Reads fp16 or bf16, but no other field of an fp16 that is disabled."""
    field, enabled = f"{section}.enabled", content.get("enabled")
    if enabled is not False or section == "bf16":
      self.read({"enabled": enabled, **content}, section)
      self.values.pop(field)
    if enabled:
      self.put("precision", section, field)
    field = "fp16.initial_scale_power"
    power = self.values.pop(field, None)
    if power is not None:
      if not 0 <= power <= _LARGEST_POWER:
        raise self.error(field, f"is {power}, not in [0, {_LARGEST_POWER}]")
      self.values["initial_loss_scale"] = 2.0**power

  def resolved(self, flag: str):
    """A flag's value: the command line's, else the file's, else None."""
    return self.given.get(flag, self.values.get(flag))

  def settle(self) -> None:
    """Checks the whole file; drops fields that the command line overrules."""
    stated = sorted(_COUNTED & set(self.values))
    if stated and self.resolved("global_batch_size") is None:
      raise self.error(
        "train_batch_size",
        f"is missing beside {self._from[stated[0]]}: steps count global "
        "batches, so it must say how large they are",
      )
    if self.overruled("precision", "precision_policy", "fp16_allreduce"):
      policy = mixed_precision.make_policy(
        self.resolved("precision") or "fp32",
        self.given.get("precision_policy") or (),
      )
      if not (policy.uses_fp16 or self.given.get("fp16_allreduce")):
        fields = dataclasses.fields(mixed_precision.LossScaleConfig)
        self.drop(field.name for field in fields)
    if self.overruled("lr_schedule"):
      self.drop(["lr_power"])
    if self.overruled("global_batch_size", "train_batch_size"):
      self.drop(["num_accumulation_steps"])

  def overruled(self, *flags: str) -> bool:
    """Whether the command line has another value for one of these flags."""
    return any(
      flag in self.given and self.given[flag] != self.values.get(flag)
      for flag in flags
    )

  def drop(self, flags: Iterable[str]) -> None:
    for flag in flags:
      self.values.pop(flag, None)


_SECTIONS = {
  "optimizer": _Reader.optimizer,
  "scheduler": _Reader.scheduler,
  "fp16": _Reader.precision,
  "bf16": _Reader.precision,
}


def _fits(value, want: str) -> bool:
  if want == _PAIR:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(_fits(item, _NUMBER) for item in value)
  if want == _BOOL or isinstance(value, bool):
    return want == _BOOL and isinstance(value, bool)
  kind = int if want == _COUNT else (int, float)
  return isinstance(value, kind) and abs(value) <= _LARGEST[want]
