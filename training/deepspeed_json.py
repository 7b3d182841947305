"""DeepSpeed-style JSON as flags: a file's fields, under the flags' names.

  {
    "train_batch_size": 65536,
    "train_micro_batch_size_per_gpu": 64,
    "optimizer": {"type": "Lamb", "params": {"lr": 11e-3}},
    "scheduler": {"type": "warmup_exp_decay_exp",
                  "params": {"total_num_steps": 7500}},
    "fp16": {"enabled": true}
  }

Every field is honoured or an error that names it. What a file leaves out keeps
the flag's default, not DeepSpeed's. Steps count global batches.

A flag on the command line wins over its field, and over what it leaves without
meaning: see `_Reader.settle`.
"""

import math
from dataclasses import fields

import mixed_precision
from common import json_files
from common.errors import UserError
from common.settings import settings_of
from gradients import lr_schedule
from mixed_precision import LossScaleConfig

OPTIMIZER_TYPES = {"Adam": "adamw", "AdamW": "adamw", "Lamb": "lamb"}

_NUMBER, _COUNT = "a number", "an integer"
_LARGEST = {_NUMBER: 1e300, _COUNT: 1 << 62}  # JSON's have no end
_LARGEST_POWER = 126  # of two, in float32
_BOOL, _PAIR = "true or false", "a list of two numbers"
_WANTED = {float: _NUMBER, int: _COUNT, bool: _BOOL}

# Flags that say something of global batches.
_COUNTED = {
  "train_batch_size", "num_accumulation_steps", "num_train_steps",
  "num_warmup_steps", "lr_decay_steps",
}  # fmt: skip

_SECTIONS = ("optimizer", "scheduler", "fp16", "bf16")
_LAMB_ONLY = ("optimizer.params.max_coeff", "optimizer.params.min_coeff")
# Fields of which flags are calculated; the others are named by their settings.
_CALCULATED = {
  "optimizer.params.betas": _PAIR,
  "scheduler.params.warmup_proportion": _NUMBER,
  "fp16.initial_scale_power": _NUMBER,
}


def flags_of(kind: type, path: str, given: dict | None = None) -> dict:
  """The values that a JSON file gives to flags, by the flags' names.

  Args:
    kind: the dataclass whose settings name the JSON's fields.
    path: the file.
    given: (optional) flags of the command line, which win, by their names;
      none of them is in the result.

  Raises:
    UserError: it is not readable JSON, a field is unknown, of the wrong type,
      without effect, or disagrees with another; the message names the field.
  """
  try:
    with open(path, "rb") as f:
      config = json_files.parse(f.read())
  except (OSError, ValueError) as e:
    raise UserError(f"--config_json={path}: not readable as JSON: {e}") from e
  reader = _Reader(kind, path, given or {})
  reader.object(config, "")
  top = {k: v for k, v in config.items() if k not in _SECTIONS}
  reader.read(top, "")
  for section in _SECTIONS:
    if section in config:
      content = reader.object(config[section], section)
      getattr(reader, section)(content)
  reader.settle()
  return {n: v for n, v in reader.values.items() if n not in reader.given}


class _Reader:
  """Collects the flags' values of one file."""

  def __init__(self, kind: type, path: str, given: dict):
    self.path, self.given = path, given
    # Field -> (what it must be, the flag).
    self.known = {f: (w, f.split(".")[-1]) for f, w in _CALCULATED.items()}
    for one in settings_of(kind):
      for field in one.json:
        self.known[field] = _WANTED[one.kind], one.name
    self.values = {}
    self._from = {}  # flag -> the field that set it

  def error(self, field: str, reason: str) -> UserError:
    """The error about a field."""
    return UserError(f"--config_json={self.path}: {field or 'it'} {reason}")

  def object(self, value, field: str) -> dict:
    """The value, which must be an object."""
    if not isinstance(value, dict):
      raise self.error(field, f"is {value!r}, not an object")
    return value

  def read(self, content: dict, section: str) -> None:
    """Takes the fields of one object over, each into its flag."""
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

  def typed(self, content: dict, section: str, types) -> tuple[str, dict]:
    """The type and params of {"type": ..., "params": {...}}."""
    extra = sorted(set(content) - {"type", "params"})
    if extra:
      raise self.error(f"{section}.{extra[0]}", "is not honoured")
    if content.get("type") not in list(types):  # may be of any type
      raise self.error(
        f"{section}.type",
        f"is {content.get('type')!r}, not one of {', '.join(types)}",
      )
    params = self.object(content.get("params", {}), f"{section}.params")
    return content["type"], params

  def optimizer(self, content: dict) -> None:
    """optimizer: {"type": Adam, AdamW or Lamb, "params": {...}}."""
    kind, params = self.typed(content, "optimizer", OPTIMIZER_TYPES)
    self.values["optimizer"] = OPTIMIZER_TYPES[kind]
    if kind != "Lamb":
      self.known = {f: w for f, w in self.known.items() if f not in _LAMB_ONLY}
    self.read(params, "optimizer.params")
    if "betas" in self.values:
      betas = self.values.pop("betas")
      self.values["beta_1"], self.values["beta_2"] = betas

  def scheduler(self, content: dict) -> None:
    """scheduler: {"type": one of `lr_schedule.SCHEDULES`, "params": {...}}."""
    kind, params = self.typed(content, "scheduler", lr_schedule.SCHEDULES)
    self.values["lr_schedule"] = kind
    self.read(params, "scheduler.params")
    proportion = self.values.pop("warmup_proportion", None)
    if proportion is not None and "num_warmup_steps" not in self.given:
      total = self.resolved("num_train_steps")
      if total is None or not 0.0 <= proportion <= 1.0:
        raise self.error(
          "scheduler.params.warmup_proportion",
          f"is {proportion}: it must be in [0, 1] and needs total_num_steps, "
          "or --num_train_steps",
        )
      self.put(
        "num_warmup_steps",
        math.ceil(round(proportion * total, 6)),
        "scheduler.params.warmup_proportion",
      )

  def fp16(self, content: dict) -> None:
    """fp16: {"enabled": ..., and the loss scale's fields}."""
    if self.enabled(content, "fp16"):
      self.put("precision", "fp16", "fp16.enabled")
      rest = {k: v for k, v in content.items() if k != "enabled"}
      self.read(rest, "fp16")
      power = self.values.pop("initial_scale_power", None)
      if power is not None:
        if not 0 <= power <= _LARGEST_POWER:
          raise self.error(
            "fp16.initial_scale_power",
            f"is {power}, not in [0, {_LARGEST_POWER}]",
          )
        self.values["initial_loss_scale"] = 2.0**power

  def bf16(self, content: dict) -> None:
    """bf16: {"enabled": ...}."""
    extra = sorted(set(content) - {"enabled"})
    if extra:
      raise self.error(f"bf16.{extra[0]}", "is not honoured")
    if self.enabled(content, "bf16"):
      self.put("precision", "bf16", "bf16.enabled")

  def enabled(self, content: dict, section: str) -> bool:
    """Whether a section is on, which it must say."""
    value = content.get("enabled")
    if not isinstance(value, bool):
      raise self.error(f"{section}.enabled", f"is {value!r}, not {_BOOL}")
    return value

  def resolved(self, flag: str, default=None):
    """A flag's value: the command line's, else the file's."""
    return self.given.get(flag, self.values.get(flag, default))

  def settle(self) -> None:
    """Checks what only the whole file shows, and drops what is overruled.

    Without meaning, and so dropped, are the loss scale's fields where the
    command line leaves nothing in fp16, the degree of another schedule than the
    file's, and the accumulation of another batch.
    """
    stated = sorted(_COUNTED & set(self.values))
    if stated and self.resolved("global_batch_size") is None:
      raise self.error(
        "train_batch_size",
        f"is missing beside {self._from[stated[0]]}: steps count global "
        "batches, so it must say how large they are",
      )
    if self.overruled("precision", "precision_policy", "fp16_allreduce"):
      policy = mixed_precision.make_policy(
        self.resolved("precision", "fp32"), self.given.get("precision_policy")
      )
      if not (policy.uses_fp16 or self.given.get("fp16_allreduce")):
        self.drop(field.name for field in fields(LossScaleConfig))
    if self.overruled("lr_schedule"):
      self.drop(["lr_power"])
    if self.overruled("global_batch_size", "train_batch_size"):
      self.drop(["num_accumulation_steps"])

  def overruled(self, *flags: str) -> bool:
    """Whether the command line has one of these flags otherwise."""
    return any(
      flag in self.given and self.given[flag] != self.values.get(flag)
      for flag in flags
    )

  def drop(self, flags) -> None:
    """Takes these flags' values out."""
    for flag in flags:
      self.values.pop(flag, None)


def _fits(value, want: str) -> bool:
  """Whether a JSON value is what a field must be."""
  if want == _BOOL:
    return isinstance(value, bool)
  if want == _PAIR:
    return (
      isinstance(value, list)
      and len(value) == 2
      and all(_fits(item, _NUMBER) for item in value)
    )
  if isinstance(value, bool):
    return False
  if not isinstance(value, int if want == _COUNT else (int, float)):
    return False
  return abs(value) <= _LARGEST[want]
