"""Everything a pre-training run is told, checked before it starts."""

import dataclasses

from common.errors import UserError
from gradients import lr_schedule
from training import input_pipeline, metrics
from training.run_config import RunConfig
from training.training_plan import rounded_up

BEST_BY = metrics.BestBy(("masked_lm_loss", "next_sentence_loss"), higher=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingConfig(RunConfig):
  """Everything a run needs, checked; fields are named like their flags."""

  input_file: str | None
  dry_run: bool = False
  dry_run_ranks: int = 1
  shuffle_block_records: int = 0
  eval_input_file: str | None = None
  max_seq_length: int | None = None
  max_predictions_per_seq: int | None = None
  max_eval_steps: int = 0
  tensor_parallel: int = 1
  num_train_steps: int = 100000
  num_warmup_steps: int = 10000

  def __post_init__(self):
    super().__post_init__()
    if not (self.do_train or self.do_eval or self.dry_run):
      raise UserError("give --do_train, --do_eval or both")
    for name in ("input_file", "output_dir"):
      if not (getattr(self, name) or self.dry_run):
        raise UserError(f"--{name} is missing")
    if self.early_stopping_evaluations and not self.eval_every_steps:
      raise UserError("--early_stopping_evaluations needs --eval_every_steps")
    self._check_tensor_parallel()
    if self.eval_input_file == "":
      raise UserError(
        "--eval_input_file is empty: name a file, or leave it out"
      )

  def _check_tensor_parallel(self) -> None:
    """Raises `UserError` for a model that cannot be sliced so."""
    count = self.tensor_parallel
    if count == 1:
      return
    for name in ("num_attention_heads", "intermediate_size"):
      if getattr(self.bert, name) % count:
        raise UserError(
          f"--tensor_parallel={count}: the BERT config's {name}="
          f"{getattr(self.bert, name)} is no multiple of it"
        )
    if self.xla == "step":
      raise UserError(
        f"--tensor_parallel={count} communicates inside of the forward pass, "
        "which --xla=step makes one program: use --xla=layers"
      )
    if self.allreduce.powersgd_rank:
      raise UserError(
        f"--tensor_parallel={count} is not for --powersgd_rank: leave one of "
        "the two out"
      )

  def flags_for(self, plan, global_batch):
    """See `RunConfig`; per-rank mode's steps, as global mode states them."""
    flags = super().flags_for(plan, global_batch)
    if self.global_batch_size is None:
      names = ["num_train_steps", "num_warmup_steps"]
      if lr_schedule.SCHEDULES[self.lr_schedule][1] == "exp":
        names.append("lr_decay_steps")
      divisor = plan.divisor * global_batch / plan.global_batch
      flags += [
        f"--{name}={rounded_up(getattr(self, name) / divisor)}"
        for name in names
      ]
    return flags

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
