"""Everything a training run is told, checked before it starts.

`RunConfig` is what all run_*.py share; each has a subclass with its own.
"""

import dataclasses
from typing import ClassVar

import mixed_precision
import modeling
import optimization
from common.errors import UserError
from common.tensorflow_v1 import tf
from gradients import distributed
from gradients.lr_schedule import Schedule, scale_peak
from model import encoder
from training import (
  deepspeed_json,
  profiling,
  training_plan,
)

_LARGEST_FLOAT = 3.4e38  # float32's, about
_MOST = (1 << 31) - 1
# Lowest and highest values of the integers.
_RANGES = {
  "dry_run_ranks": (1, _MOST),
  "max_seq_length": (1, 1 << 16),
  "max_predictions_per_seq": (1, 1 << 16),
  "train_batch_size": (1, _MOST),
  "eval_batch_size": (1, _MOST),
  "num_accumulation_steps": (1, _MOST),
  "global_batch_size": (1, _MOST),
  "shuffle_block_records": (0, _MOST),
  "lr_decay_steps": (1, _MOST),
  "num_train_steps": (1, _MOST),
  "num_warmup_steps": (0, _MOST),
  "save_checkpoints_steps": (0, _MOST),
  "keep_checkpoints": (1, _MOST),
  "commit_every_steps": (1, _MOST),
  "log_every_steps": (1, _MOST),
  "eval_every_steps": (0, _MOST),
  "early_stopping_evaluations": (0, _MOST),
  "max_eval_steps": (0, _MOST),
  "seed": (0, (1 << 63) - 1),
  "num_threads": (0, 4096),
  "tensor_parallel": (1, 4096),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Everything a run needs, checked; fields are named like their flags.

  Attributes of the kind of run:
    ends_with_best: whether the last evaluation is of the best weights.
    evaluates_untrained: whether an evaluation comes before the first update.
    length_flag: the flag that says how long to train.
  """

  ends_with_best: ClassVar[bool] = False
  evaluates_untrained: ClassVar[bool] = True
  length_flag: ClassVar[str] = "--num_train_steps"

  bert: modeling.BertConfig
  optimizer: optimization.OptimizerConfig
  loss_scale: mixed_precision.LossScaleConfig
  allreduce: distributed.AllreduceConfig
  output_dir: str | None
  do_train: bool
  do_eval: bool
  init_checkpoint: str | None = None
  train_batch_size: int = 32
  eval_batch_size: int = 32
  num_accumulation_steps: int | None = None
  global_batch_size: int | None = None
  learning_rate: float = 5e-5
  lr_scaling: str = "none"
  precision: str = "fp32"
  precision_policy: tuple = ()
  xla: str = "layers"
  recompute: tuple = ()
  lr_schedule: str = "linear"
  lr_power: float | None = None
  lr_decay_rate: float = 0.9
  lr_decay_steps: int = 1000
  lr_offset: float = 0.0
  rewarmup: bool = True
  save_checkpoints_steps: int = 1000
  keep_checkpoints: int = 5
  commit_every_steps: int = 10
  log_every_steps: int = 10
  eval_every_steps: int = 0
  early_stopping_evaluations: int = 0
  peak_tflops: float | None = None
  profile_steps: tuple = ()
  seed: int = 12345
  num_threads: int = 0

  def __post_init__(self):
    if self.eval_every_steps and not self.do_eval:
      raise UserError("--eval_every_steps needs --do_eval")
    # Those of --config_json have not passed the flags' own bounds.
    for name, (least, most) in _RANGES.items():
      value = getattr(self, name, None)
      if value is not None and not least <= value <= most:
        raise UserError(f"--{name}={value}: must be {least} to {most}")
    parts = (self, self.optimizer, self.loss_scale)
    for name, value in (item for part in parts for item in vars(part).items()):
      if isinstance(value, float) and not abs(value) <= _LARGEST_FLOAT:
        raise UserError(f"--{name}={value}: must be finite, in float32")
    for name in ("learning_rate", "lr_offset", "lr_power"):
      value = getattr(self, name)
      if value is not None and value < 0:
        raise UserError(f"--{name}={value}: must not be negative")
    if self.peak_tflops is not None and self.peak_tflops <= 0:
      raise UserError(f"--peak_tflops={self.peak_tflops}: must be positive")
    profiling.window(self.profile_steps)
    if self.init_checkpoint == "":
      raise UserError(
        "--init_checkpoint is empty: name a checkpoint, or leave it out"
      )
    for name in ("output_dir", "init_checkpoint"):
      value = getattr(self, name) or ""
      if set(value) & set("*?[]\\"):
        raise UserError(
          f"--{name}={value}: TensorFlow finds no checkpoint under a name with "
          "one of *?[]\\"
        )
    unknown = sorted(set(self.recompute) - set(encoder.RECOMPUTE))
    if unknown:
      raise UserError(
        f"--recompute={','.join(self.recompute)}: {unknown[0]} is not one of "
        f"{', '.join(encoder.RECOMPUTE)}"
      )
    self.schedule(self.learning_rate, total=1, warmup=0)
    self.loss_scale.check(self.uses_fp16)

  @classmethod
  def from_flags(cls, flags) -> "RunConfig":
    """Raises `UserError` for every setting that cannot be right."""
    try:
      bert = modeling.BertConfig.from_json_file(flags.bert_config_file)
    except (ValueError, tf.errors.OpError) as e:
      message = getattr(e, "message", None) or str(e)
      if flags.bert_config_file not in message:
        message = f"{flags.bert_config_file}: {message}"
      raise UserError(f"--bert_config_file: {message}") from e
    # A flag on the command line wins.
    found = cls.found(flags)
    found = {n: v for n, v in found.items() if not flags[n].present}

    def value(field):
      if field.name == "bert":
        return bert
      if dataclasses.is_dataclass(field.type):
        return part(field.type)
      return found.get(field.name, getattr(flags, field.name))

    def part(kind):
      return kind(**{f.name: value(f) for f in dataclasses.fields(kind)})

    return part(cls)

  @classmethod
  def found(cls, flags) -> dict:
    """Values of flags that are set elsewhere: flag -> value."""
    if getattr(flags, "config_json", None) is None:
      return {}
    given = {n: flags[n].value for n in flags if flags[n].present}
    return deepspeed_json.flags_of(flags.config_json, given)

  def as_dict(self) -> dict:
    """Plain values, for the run folder and to compare ranks."""
    return {**dataclasses.asdict(self), "bert": self.bert.to_dict()}

  @property
  def policy(self) -> mixed_precision.Policy:
    """The type in which each part of the network computes."""
    return mixed_precision.make_policy(self.precision, self.precision_policy)

  @property
  def uses_fp16(self) -> bool:
    """Whether a gradient is float16 somewhere, whose range needs a scale."""
    return self.policy.uses_fp16 or self.allreduce.fp16_allreduce

  @property
  def profile(self) -> profiling.Window | None:
    """The updates of --profile_steps."""
    return profiling.window(self.profile_steps)

  def schedule(
    self, peak: float, total: int, warmup: int, divisor: float = 1.0
  ) -> Schedule:
    """The learning rate of each update; `divisor` as in `TrainingPlan`."""
    return Schedule(
      peak=peak,
      total=total,
      warmup=warmup,
      name=self.lr_schedule,
      power=self.lr_power,
      decay_rate=self.lr_decay_rate,
      decay_steps=training_plan.rounded_up(self.lr_decay_steps / divisor),
      offset=self.lr_offset,
    )

  def planned_schedule(self, plan: training_plan.TrainingPlan) -> Schedule:
    """The learning rate of each update of a plan."""
    return self.schedule(
      scale_peak(self.learning_rate, self.lr_scaling, plan.ranks),
      plan.updates,
      plan.warmup_updates,
      plan.divisor,
    )

  def flags_for(
    self, plan: training_plan.TrainingPlan, global_batch: int
  ) -> list[str]:
    """The flags that make as much of another global batch of `plan`'s data.

    Args:
      plan: that of these settings.
      global_batch: records.
    """
    return [f"--global_batch_size={plan.examples(global_batch)}"]
