"""Everything a pre-training run is told, checked before it starts."""

import dataclasses
import math

import config_json
import distributed
import encoder
import input_pipeline
import mixed_precision
import modeling
import optimization
import train_loop
from errors import UserError
from lr_schedule import Schedule
from tensorflow_v1 import tf

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
  "max_eval_steps": (0, _MOST),
  "seed": (0, (1 << 63) - 1),
  "num_threads": (0, 4096),
}


@dataclasses.dataclass(frozen=True)
class PretrainingConfig:
  """Everything a run needs, checked; fields are named like their flags."""

  bert: modeling.BertConfig
  optimizer: optimization.OptimizerConfig
  loss_scale: mixed_precision.LossScaleConfig
  allreduce: distributed.AllreduceConfig
  input_file: str | None
  output_dir: str | None
  do_train: bool
  do_eval: bool
  dry_run: bool = False
  dry_run_ranks: int = 1
  shuffle_block_records: int = 0
  eval_input_file: str | None = None
  init_checkpoint: str | None = None
  max_seq_length: int | None = None
  max_predictions_per_seq: int | None = None
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
  num_train_steps: int = 100000
  num_warmup_steps: int = 10000
  save_checkpoints_steps: int = 1000
  keep_checkpoints: int = 5
  commit_every_steps: int = 10
  log_every_steps: int = 10
  eval_every_steps: int = 0
  max_eval_steps: int = 0
  seed: int = 12345
  num_threads: int = 0

  def __post_init__(self):
    if not (self.do_train or self.do_eval or self.dry_run):
      raise UserError("give --do_train, --do_eval or both")
    for name in ("input_file", "output_dir"):
      if not (getattr(self, name) or self.dry_run):
        raise UserError(f"--{name} is missing")
    if self.eval_every_steps and not self.do_eval:
      raise UserError("--eval_every_steps needs --do_eval")
    # Those of --config_json have not passed the flags' own bounds.
    for name, (least, most) in _RANGES.items():
      value = getattr(self, name)
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
    for name in ("init_checkpoint", "eval_input_file"):
      if getattr(self, name) == "":
        raise UserError(f"--{name} is empty: name a file, or leave it out")
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
  def from_flags(cls, flags) -> "PretrainingConfig":
    """Raises `UserError` for every setting that cannot be right."""
    try:
      bert = modeling.BertConfig.from_json_file(flags.bert_config_file)
    except (ValueError, tf.errors.OpError) as e:
      message = getattr(e, "message", None) or str(e)
      if flags.bert_config_file not in message:
        message = f"{flags.bert_config_file}: {message}"
      raise UserError(f"--bert_config_file: {message}") from e
    # A flag on the command line wins over the JSON.
    given = {}
    if flags.config_json is not None:
      given = config_json.flags_of(flags.config_json)
    given = {n: v for n, v in given.items() if not flags[n].present}

    def values(part, *others):
      names = {f.name for f in dataclasses.fields(part)} - set(others)
      return {name: given.get(name, getattr(flags, name)) for name in names}

    return cls(
      bert=bert,
      optimizer=optimization.OptimizerConfig(
        **values(optimization.OptimizerConfig)
      ),
      loss_scale=mixed_precision.LossScaleConfig(
        **values(mixed_precision.LossScaleConfig)
      ),
      allreduce=distributed.AllreduceConfig(
        **values(distributed.AllreduceConfig)
      ),
      **values(cls, "bert", "optimizer", "loss_scale", "allreduce"),
    )

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

  def schedule(
    self, peak: float, total: int, warmup: int, divisor: int = 1
  ) -> Schedule:
    """The learning rate of each update; `divisor` as in `TrainingPlan`."""
    return Schedule(
      peak=peak,
      total=total,
      warmup=warmup,
      name=self.lr_schedule,
      power=self.lr_power,
      decay_rate=self.lr_decay_rate,
      decay_steps=math.ceil(self.lr_decay_steps / divisor),
      offset=self.lr_offset,
    )

  def loop(self) -> train_loop.LoopConfig:
    """The part that the loop reads."""
    return train_loop.LoopConfig(
      **{
        f.name: getattr(self, f.name)
        for f in dataclasses.fields(train_loop.LoopConfig)
      }
    )

  def record_shape(self, files: str) -> input_pipeline.RecordShape:
    """Lengths from the flags, else from the records' manifest, else 128/20."""
    shape = {"max_seq_length": 128, "max_predictions_per_seq": 20}
    shape |= input_pipeline.manifest_shape(files) if files else {}
    for name in ("max_seq_length", "max_predictions_per_seq"):
      shape[name] = getattr(self, name) or shape[name]
    if shape["max_predictions_per_seq"] > shape["max_seq_length"]:
      raise UserError(
        f"--max_predictions_per_seq={shape['max_predictions_per_seq']}: more "
        f"than --max_seq_length={shape['max_seq_length']} tokens"
      )
    if shape.get("masks"):
      made = shape["masks"].max_predictions_per_seq
      if (
        shape["max_predictions_per_seq"] < made
        and shape["examples_per_record"] > 1
      ):
        raise UserError(
          f"--max_predictions_per_seq={shape['max_predictions_per_seq']}: "
          f"{files} are packed for {made} masked tokens a record"
        )
      shape["masks"] = shape["masks"]._replace(
        max_predictions_per_seq=shape["max_predictions_per_seq"]
      )
    return input_pipeline.RecordShape(vocab_size=self.bert.vocab_size, **shape)
