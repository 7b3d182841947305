"""The settings of training runs: of all run_*.py, and of run_pretraining.py."""

import contextlib
import dataclasses
from typing import Any, ClassVar

from common import settings
from common.errors import UserError
from common.settings import in_group, setting
from config import deepspeed_json, execution, optimizers, stages, training_plan
from config.bert_config import BertConfig, read_bert
from config.exchange_config import AllreduceConfig
from config.lr_schedule import LR_SCALINGS, SCHEDULES, Schedule, scale_peak
from config.precision import AUTO, PARTS, TYPES, LossScaleConfig, types_of_parts
from config.stages import Growth
from records import data_set, masking, record_files, record_order

_task, _data, _model = map(in_group, ("What to do", "Data", "Model"))
_batch = in_group("Batches and steps")
_rate = in_group("Learning rate and optimizer")
_precision = in_group("Precision and compilation")
_ranks = in_group("Ranks and gradients")
_report, _eval = map(in_group, ("Checkpoints and reports", "Evaluation"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Settings of a run; fields are named like their flags."""

  kind: ClassVar[str]  # of the task, as run folders name it
  # Evaluates the best weights last, and none before the first update.
  ends_with_best: ClassVar[bool] = False
  do_predict = False  # a field of fine-tunings only
  length_flag: ClassVar[str] = "--num_train_steps"  # how long to train
  unit: ClassVar[str] = "records"  # what batches are counted in

  # fmt: off
  do_train: bool = _task(False, "Train the model.")
  do_eval: bool = _task(False,
    "Evaluate the model: at the end, and while training as --eval_every_steps "
    "says. Fine-tuning evaluates its best checkpoint at the end.")
  bert: BertConfig = _model(None,
    "JSON file with the BERT config; or tiny, mini, base, large, modern_tiny, "
    "..., the models of configs/, with the size of the vocabulary (of the "
    "records' manifest to pre-train) as vocab_size, if it is known. Default: "
    "as found in --output_dir, or beside --init_checkpoint.",
    flag="bert_config_file", read=read_bert)
  init_checkpoint: str | None = _model(None,
    "Model whose weights a new run starts from: a run folder (its best "
    "checkpoint by evaluation, else the newest), a checkpoint's name, "
    "google/bert's or ours, or a Hugging Face folder. Ignored if --output_dir "
    "already has a checkpoint: the run then resumes from that one.")
  train_batch_size: int = _batch(32,
    "Number of {unit} in one rank's micro-batch (one forward and backward "
    "pass). With --global_batch_size this is the most that it may have.",
    low=1, json="train_micro_batch_size_per_gpu")
  num_accumulation_steps: int | None = _batch(None,
    "Micro-batches that one rank adds up for one update. Default: 1, or what "
    "--global_batch_size needs.", low=1, json="gradient_accumulation_steps")
  global_batch_size: int | None = _batch(None,
    "Examples in one update, over all ranks and micro-batches. Default: "
    "--train_batch_size x ranks x --num_accumulation_steps. A run keeps its "
    "global batch when it is resumed.",
    low=1, json="train_batch_size")
  learning_rate: float = _rate(5e-5,
    "Peak learning rate, which the warm-up rises to.",
    low=0, json="optimizer.params.lr")
  lr_schedule: str = _rate("linear",
    "How the learning rate rises to the peak and falls; "
    "config/lr_schedule.py has the formulas.",
    choices=SCHEDULES)
  lr_scaling: str = _rate("none",
    "Factor on the peak learning rate: 1 (none), the square root of the number "
    "of ranks (sqrt), or that number (linear). With sqrt and linear a run "
    "resumes only on as many ranks as before.", choices=sorted(LR_SCALINGS))
  lr_power: float | None = _rate(None,
    "Exponent of a polynomial decay of the learning rate. Default: 1 for "
    "linear, 0.5 for poly, 2 for warmup_exp_decay_poly.",
    low=0, json="scheduler.params.degree")
  lr_decay_rate: float = _rate(0.9,
    "Factor by which an exponential decay multiplies the learning rate every "
    "--lr_decay_steps.",
    above=0, high=1, json="scheduler.params.decay_rate")
  lr_decay_steps: int = _rate(1000,
    "Steps in which an exponential decay multiplies the learning rate by "
    "--lr_decay_rate. They are counted like --num_train_steps; in fine-tuning "
    "as updates of the batch that is asked for.",
    low=1, json="scheduler.params.decay_step")
  num_decay_steps: int | None = _rate(None,
    "Steps at the end in which the rate of --lr_schedule=wsd falls to 0: as 1 "
    "minus the square root of the share that has passed, or linearly "
    "(wsd_linear). They are counted like --num_train_steps; in fine-tuning as "
    "updates of the batch that is asked for. Default: a tenth of the run.",
    low=1)
  lr_offset: float = _rate(0.0,
    "Learning rate that is added to the schedule's at every update.",
    low=0, json="scheduler.params.lr_offset")
  rewarmup: bool = _rate(True,
    "Start the learning rate schedule from its beginning with "
    "--init_checkpoint of another run. --norewarmup continues from that run's "
    "update; a rate that has fallen to 0 stays 0.",
    json="scheduler.params.rewarmup")
  optimizer: optimizers.OptimizerConfig = _rate()
  average_updates: int = _rate(0,
    "Keep an average of the weights over about so many last updates in "
    "checkpoints: a mean at first, then exponential. It needs the memory of "
    "the weights once more, and --lr_schedule=constant goes well with it. 0: "
    "no average.", low=0)
  precision: str = _precision("fp32",
    "Type of the matrix multiplications, Muon's too. Variables, moments, "
    "softmax, GELU, layer norm and losses stay float32. auto: bf16 if a "
    "measurement at the start finds it faster here, else fp32; a run that "
    "resumes keeps its own.",
    choices=(*TYPES, AUTO))
  precision_policy: tuple = _precision((),
    "Types of parts of the network that differ from --precision, as "
    f"part=type,... The parts are {', '.join(PARTS)}; the "
    f"types are {', '.join(TYPES)}.")
  tf32: bool = _precision(True,
    "Let GPUs multiply float32 matrices as TensorFloat-32, with 10 of 23 bits "
    "of mantissa.")
  deterministic: bool = _precision(False,
    "Ask TensorFlow for equal results of equal runs on equal GPUs, which is "
    "slower. CPUs always give them.")
  xla: str = _precision("layers",
    "What XLA compiles. off: nothing. auto: what TensorFlow clusters. layers: "
    "the work of a layer between its matrix multiplications, and the update. "
    "step: the forward and backward pass as one program, and the update.",
    choices=execution.MODES)
  recompute: tuple = _precision((),
    "Results that the backward pass computes again instead of keeping them in "
    "memory. Empty: none.", choices=execution.RECOMPUTE)
  loss_scale: LossScaleConfig = _precision()
  allreduce: AllreduceConfig = _ranks()
  tensor_parallel: int = _ranks(1,
    "Consecutive ranks that hold one model together, each a slice of every "
    "layer. They count as one rank for batch sizes and steps. Checkpoints stay "
    "the same.", low=1, high=4096)
  commit_every_steps: int = _ranks(10,
    "Updates between two copies of the state in the memory of each rank, under "
    "horovodrun --min-np. When a rank is lost, the others resume from the last "
    "copy.", low=1)
  num_threads: int = _ranks(0,
    "CPU threads for one operation of a rank. 0 divides the host's cores by "
    "its ranks (in an elastic run, by the ranks present when this one joined).",
    low=0, high=4096)
  output_dir: str | None = _report(None,
    "Folder for checkpoints, metrics and run.json; for task.json and "
    "predictions in fine-tuning. A training that finds its own checkpoint "
    "there resumes from it; an evaluation or a prediction of fine-tuning uses "
    "the best one. Needed, except by run_pretraining.py's --dry_run.")
  save_checkpoints_steps: int = _report(1000,
    "Updates between two checkpoints. 0 saves one at the end of the run, and "
    "when an evaluation is the best so far.", low=0)
  save_every_minutes: float = _report(0.0,
    "Minutes after which a checkpoint is saved, besides those of "
    "--save_checkpoints_steps. 0 sets no time.", low=0)
  keep_checkpoints: int = _report(5,
    "Newest checkpoints to keep in --output_dir. The best one by evaluation is "
    "kept as well.", low=1)
  log_every_steps: int = _report(10,
    "Updates between two reports in metrics.jsonl and TensorBoard.",
    low=1, json="steps_per_print")
  report_to: tuple = _report((),
    "Services that get settings, plan, reports and evaluations, too; packages "
    "are in requirements/reports.txt. A resumed run is the same run there.",
    choices=("wandb", "mlflow"))
  peak_tflops: float | None = _report(None,
    "Peak speed of one rank in 10^12 floating-point operations per second, "
    "for the utilisation (mfu) in reports: matmul_gflop_per_second / 1000 of "
    "benchmarks/step.py. Without it reports have no mfu.", above=0)
  profile_steps: tuple = _report((),
    "First and last update to record for TensorBoard's trace viewer, as 20,24 "
    "(numbers as in metrics.jsonl). Empty: no update is recorded.")
  eval_batch_size: int = _eval(32,
    "Number of {unit} in one rank's batch of an evaluation.", low=1)
  eval_every_steps: int = _eval(0,
    "Updates between two evaluations while training; pre-training also "
    "evaluates before its first update. 0: only at the end, or as "
    "--eval_every_epochs of fine-tuning says. Needs --do_eval.",
    low=0, needs="do_eval")
  evaluate_average: bool = _eval(False,
    "Evaluate, and predict with, the average of the weights in their place. "
    "The best checkpoint is then chosen by the average. A command that does "
    "not train has this flag, and --average_updates, as --output_dir's run.",
    needs="average_updates")
  early_stopping_evaluations: int = _eval(0,
    "Evaluations in a row without a new best result after which training "
    "stops. 0: it never stops early. Needs evaluations while training.", low=0)
  seed: int = setting(12345,
    "Seed of initial weights, the order of {unit}, dropout, and masks, if any.",
    low=0, high=(1 << 63) - 1, group="Other")
  # fmt: on

  def __post_init__(self):
    if self.bert is None:
      raise UserError(
        "--bert_config_file is missing: give tiny, mini, base, large or a "
        "file; or give --init_checkpoint a model that has a config"
      )
    # The values of --config_json have not passed the flags' own parsers.
    settings.check(self)
    self.profile  # noqa: B018, only for its error
    for name in ("init_checkpoint", "eval_input_file"):
      if getattr(self, name, None) == "":
        raise UserError(f"--{name} is empty: give a name, or leave it out")
    for name in ("output_dir", "init_checkpoint"):
      value = getattr(self, name) or ""
      if set(value) & set("*?[]\\"):
        raise UserError(
          f"--{name}={value}: TensorFlow finds no checkpoint under a name with "
          "one of *?[]\\"
        )
    _, form = SCHEDULES[self.lr_schedule]
    for name, is_read in (
      ("num_decay_steps", form in ("line", "sqrt")),
      ("lr_power", form == "poly"),
    ):
      if getattr(self, name) is not None and not is_read:
        raise UserError(
          f"--{name}={getattr(self, name)} has no meaning for "
          f"--lr_schedule={self.lr_schedule}"
        )
    if self.xla != "off":
      execution.check_gpus()
    self.loss_scale.check(self.uses_fp16)
    if self.tensor_parallel > 1:
      self._check_slices(f"--tensor_parallel={self.tensor_parallel}")

  def _check_slices(self, flag: str) -> None:
    for name in ("num_attention_heads", "key_value_heads", "intermediate_size"):
      size = getattr(self.stage_bert, name)
      if size % self.tensor_parallel:
        raise UserError(
          f"{flag}: the BERT config's {name}={size} is not a multiple of it"
        )
    needs: dict[str, Any] = {
      "--xla=layers: ranks communicate in the forward pass, which "
      f"--xla={self.xla} makes one program": self.xla != "step",
      "no --powersgd_rank": not self.allreduce.powersgd_rank,
    }
    _check_needs(flag, needs)

  @property
  def stage_bert(self) -> BertConfig:
    """The model that is trained now: `bert`, but for stages of other sizes."""
    return self.bert

  @classmethod
  def read_flags(cls, flags) -> tuple[dict, dict, dict]:
    """The flags that are given, those in files that they name, and `contents`.

    Each file that others need, too, is read here, once; see `settings.make`.
    """
    present = settings.present(flags)
    return present, *cls.in_files(present)

  @classmethod
  def in_files(cls, present: dict) -> tuple[dict, dict]:
    """The content of files that flags name: (flag -> value, field -> value)."""
    return {}, {}

  def check_files(self) -> None:
    """Raises an error for a file to read that is missing."""

  def how_to_continue(self) -> str:
    """What to do to train longer, once the training is complete."""
    return f"to continue, give the same command with more {self.length_flag}"

  def lower_rate(self, stage: training_plan.Stage) -> tuple[str, list[str]]:
    """How to halve the learning rate: in words, and flags that do it."""
    flag = f"--learning_rate={self.learning_rate / 2:g}"
    return "with a lower learning rate", [flag]

  def as_dict(self) -> dict:
    """Plain values, for the run folder and to compare ranks."""
    return {**dataclasses.asdict(self), "bert": self.bert.to_dict()}

  @property
  def uses_fp16(self) -> bool:
    """Whether a gradient is float16 somewhere: it needs a loss scale."""
    types = types_of_parts(self.precision, self.precision_policy)
    return "fp16" in types.values() or self.allreduce.fp16_allreduce

  @property
  def profile(self) -> tuple[int, int] | None:
    """First and last update of --profile_steps; None if it is empty."""
    if not self.profile_steps:
      return None
    with contextlib.suppress(TypeError, ValueError):
      first, last = map(int, self.profile_steps)
      if 1 <= first <= last:
        return first, last
    raise UserError(
      f"--profile_steps={','.join(map(str, self.profile_steps))}: want "
      "FIRST,LAST, the numbers of two updates, for example 20,24"
    )

  def planned_schedule(self, plan: training_plan.TrainingPlan) -> Schedule:
    return Schedule(
      scale_peak(self.learning_rate, self.lr_scaling, plan.ranks),
      plan.stage.total_updates or plan.updates, plan.warmup_updates,
      name=self.lr_schedule, power=self.lr_power,
      decay_rate=self.lr_decay_rate, offset=self.lr_offset,
      decay_steps=training_plan.rounded_up(self.lr_decay_steps / plan.divisor),
      cooldown=plan.decay_updates,
    )  # fmt: skip

  def flags_for(
    self, plan: training_plan.TrainingPlan, global_batch: int
  ) -> list[str]:
    """The flags for a `global_batch` in records, with `plan`'s data."""
    return [f"--global_batch_size={plan.examples(global_batch)}"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingConfig(RunConfig):
  """Settings of run_pretraining.py."""

  kind: ClassVar[str] = "pretraining"

  # fmt: off
  dry_run: bool = _task(False,
    "Print the plan and what it needs: memory, time and disk, measured by some "
    "updates on fake records in child processes. Writes nothing.")
  dry_run_ranks: int | None = _task(None,
    "Ranks that --dry_run plans for; they need not exist. Without GPUs, the "
    "plan assumes at most one rank on each core of a host. Default: as many as "
    "horovodrun started, or 1.", low=1, needs="dry_run")
  find_batch_size: bool = _task(False,
    "With --dry_run, try larger and larger micro-batches in child processes, "
    "and print the --train_batch_size of the largest that fits in the memory.",
    needs="dry_run")
  config_json: str | None = _task(None,
    "DeepSpeed-style JSON file with batch sizes, optimizer, schedule and "
    "precision. A flag on the command line wins over the file; fields that "
    "such a flag makes meaningless are ignored.")
  stages: tuple | None = _task(None,
    "JSON file with a list of stages, each with its own data, lengths, batch, "
    "masks, dropout or size of the model: see docs/training.md. Weights, "
    "moments, the learning rate's schedule and the position in the data "
    "continue.",
    read=stages.read, excludes=("cooldown_from", "num_accumulation_steps"))
  input_file: str | None = _data(None,
    "Record files to train on: names, globs and URLs (s3://...), "
    "comma-separated. Needed unless it is a --dry_run, or --stages name them.")
  eval_input_file: str | None = _data(None,
    "Record files to evaluate on: names and globs, comma-separated. Default: "
    "--input_file.")
  max_seq_length: int | None = _data(None,
    "Tokens in one record. Default: as the manifest of the records says, or "
    "128 for records without one.", low=1, high=1 << 16)
  max_predictions_per_seq: int | None = _data(None,
    "Masked tokens in one record, at most. Default: as the manifest of the "
    "records says, or 20 for records without one; with --masked_lm_prob what "
    "that needs.", low=1, high=1 << 16)
  masks: masking.MaskConfig = _data(masking.MaskConfig())
  objective: str | None = _data(None,
    "What the model learns. mlm_nsp: masked LM and next sentence prediction. "
    "mlm: masked LM alone, without the other head and the pooler. Default: as "
    "the run in --output_dir, else as --input_file was made.",
    choices=data_set.OBJECTIVES)
  segment_ids: bool | None = _data(None,
    "Tell the model which tokens are of an example's second segment. Default: "
    "as this flag was given when the model of --output_dir or "
    "--init_checkpoint was trained, else true for mlm_nsp, false for mlm. A "
    "model of --init_checkpoint is evaluated with what it learned.")
  other_vocabulary: bool = _data(False,
    "Start from --init_checkpoint although --input_file was made with another "
    "vocabulary or case than its model: what its embeddings have learned is of "
    "other words then.", needs="init_checkpoint")
  shuffle_block_records: int = _data(0,
    "Records in one block (a few MB), for data larger than memory: blocks are "
    f"shuffled, and the records of {record_order.WINDOW_BLOCKS} blocks at a "
    "time. Reading needs the memory of twice as many blocks. 0 shuffles all "
    "records at once.", low=0)
  num_train_steps: int = _batch(100000,
    "Steps of the whole run: updates with --global_batch_size. Without it they "
    "are those of one rank alone: the run divides them by its ranks, by the "
    "micro-batches of an update and by the examples of a record.",
    low=1, json="scheduler.params.total_num_steps")
  num_warmup_steps: int | None = _batch(None,
    "Warm-up steps, included in --num_train_steps, in which the learning rate "
    "rises to its peak. Default: a tenth of the run, but at most 10,000.",
    low=0, json="scheduler.params.warmup_num_steps")
  cooldown_from: str | None = _rate(None,
    "Run folder, or one of its checkpoints, from which this new run continues "
    "in another --output_dir: the rate of --lr_schedule=wsd (or wsd_linear) "
    "falls to 0 in --num_decay_steps, and the run ends. The checkpoint must "
    "be of the part with a constant rate; a folder means its newest one. "
    "Moments, counters and the position in the data are that run's. Give its "
    "other flags, too, but not --init_checkpoint.", needs="num_decay_steps",
    excludes=("init_checkpoint", "max_train_minutes"))
  max_train_minutes: float = _batch(0.0,
    "Minutes to train, over all starts of a run. Evaluations and saves count; "
    "starting and the first update, which compiles, do not. The schedule of "
    "the learning rate follows the clock, or the updates if they are further "
    "along, so the rate has decayed when time is up. 0 sets no limit.",
    low=0)
  initial_weights: str = _model("random",
    "Weights that a new run starts from, where no --init_checkpoint has them. "
    "random: google/bert's. informed: output bias from the frequencies of "
    "tokens in --input_file, word embeddings from their co-occurrence, "
    "sinusoidal positions, heads that predict words from neighbours and, with "
    "rotary positions, copy, an identity in the masked LM's head; the rest is "
    "google/bert's.",
    choices=("random", "informed"))
  sampled_softmax: int = _model(0,
    "Number of sampled tokens in training's masked LM softmax, besides the "
    "labels; resampled every update, frequent ones almost always. A small "
    "model with a large vocabulary trains up to twice as fast. Training's loss "
    "and accuracy are then estimates; evaluations use all tokens. 0: all.",
    low=0, excludes=("tensor_parallel",))
  z_loss: float = _model(0.0,
    "Factor of (log Z)^2, which training adds to the loss of each masked "
    "token; Z is the sum of the exponentials of its logits. It keeps logits "
    "small, and bf16 exact, at high learning rates; 1e-4 is usual. Losses are "
    "reported without it. 0: none.", low=0)
  hidden_dropout_prob: float | None = _model(None,
    "Share of the numbers in embeddings and in layers' outputs that dropout "
    "zeroes in this training. 0 suits text that is seen a few times only. "
    "Default: as in --bert_config_file.", low=0, below=1)
  attention_probs_dropout_prob: float | None = _model(None,
    "Share of the attention probabilities that dropout zeroes in this "
    "training. Default: as in --bert_config_file.", low=0, below=1)
  # Of a stage, its number from 0.
  stage: int | None = None
  max_eval_steps: int = _eval(0,
    "Batches of one evaluation over all ranks, at most. 0 evaluates on every "
    "record.", low=0)
  # fmt: on

  def __post_init__(self):
    super().__post_init__()
    if not (self.do_train or self.do_eval or self.dry_run):
      raise UserError("give --do_train, --do_eval or both")
    if self.early_stopping_evaluations and not self.eval_every_steps:
      raise UserError("--early_stopping_evaluations needs --eval_every_steps")
    for name in ("input_file", "output_dir"):
      if not (getattr(self, name) or self.dry_run):
        raise UserError(f"--{name} is missing")
    width = self.stage_bert.hidden_size
    if self.do_train and self.initial_weights == "informed" and width % 2:
      raise UserError(
        f"--initial_weights=informed: the BERT config's hidden_size={width} is "
        "odd, and sinusoids come in pairs: use --initial_weights=random"
      )
    for flag in ("cooldown_from", "stages"):
      if getattr(self, flag) and not (self.do_train or self.dry_run):
        raise UserError(f"--{flag} needs --do_train")
    if self.stages:
      self._check_stages()

  @property
  def stage_bert(self):
    """`bert` with the stage's keys; the run folder keeps `bert`."""
    item = {} if self.stage is None else (self.stages or ())[self.stage]
    return stages.model_of(self.bert, item)

  @property
  def trained_bert(self) -> BertConfig:
    """`stage_bert` with the dropout of this training."""
    return self.stage_bert.with_dropout(
      self.hidden_dropout_prob, self.attention_probs_dropout_prob
    )

  def growth_from(self, number: int) -> Growth:
    """How the model comes from that of stage `number`."""
    return stages.growth(self.bert, self.stages, number, self.stage or 0)

  def warmup_of(self, steps: int) -> int:
    """The steps of warm-up in a run of so many steps."""
    most = max(0, min(10_000, steps // 10, steps - (self.num_decay_steps or 0)))
    return most if self.num_warmup_steps is None else self.num_warmup_steps

  def _check_stages(self) -> None:
    # What a stage sets, or what counts steps of one batch, has no meaning for
    # the whole run.
    items = self.stages or ()
    has_theta = any("global_rope_theta" in item for item in items)
    own = stages.model_of(self.bert, items[-1]).differences(self.bert)
    needs: dict[str, Any] = {
      "--global_batch_size, or one in each stage": self.global_batch_size,
      "no --num_train_steps (total_num_steps in --config_json), except with "
      "--max_train_minutes": (
        self.max_train_minutes
        or self.num_train_steps == type(self).num_train_steps
      ),
      "--eval_input_file, because stages have their own --input_file": (
        self.eval_input_file
        or not self.do_eval
        or not any("input_file" in item for item in items)
      ),
      "rotary positions in the BERT config for global_rope_theta": (
        self.bert.position_type == "rotary" or not has_theta
      ),
      f"the BERT config's {', '.join(own)} in the last stage, because the "
      "trained model has it": not own,
    }
    _check_needs("--stages", needs)
    stages.check_models(self.bert, items)

  def _check_slices(self, flag):
    super()._check_slices(flag)
    # Ranks of one model read the clock at different times.
    moves = len(set(self.masks.masked_lm_prob or ())) > 1
    need = "the same masks in all slices: one --masked_lm_prob, or no"
    is_met = not (self.max_train_minutes and moves)
    _check_needs(flag, {f"{need} --max_train_minutes": is_met})

  @classmethod
  def in_files(cls, present):
    values, content = {}, {}
    if "stages" in present:
      each = content["stages"] = stages.read(present["stages"])
      # What each stage has need not be a flag. The first stage's stands for it:
      # its data is read first.
      in_all = set.intersection(*map(set, each))
      if "input_file" in in_all:
        values["input_file"] = each[0]["input_file"]
      if "global_batch_size" in in_all:
        values["global_batch_size"] = each[0]["global_batch_size"][1]
    if "config_json" in present:
      known = values | present
      values |= deepspeed_json.flags_of(cls, present["config_json"], known)
    return values, content

  def check_files(self):
    held_out = self.eval_input_file if self.do_eval else None
    for patterns in (self.input_file, held_out):
      if patterns:
        record_files.find(patterns).expect_records()

  def how_to_continue(self):
    if self.cooldown_from:
      return "the cooldown is complete: another one is a new run"
    if not self.stages:
      return super().how_to_continue()
    if not self.max_train_minutes:
      return "to continue, add a stage to --stages"
    return (
      f"ended by --num_train_steps={self.num_train_steps}: to train longer, "
      "start a new run"
    )

  def lower_rate(self, stage):
    if "learning_rate" not in (self.stages or [{}])[stage.number]:
      return super().lower_rate(stage)
    rate = f'"learning_rate": {self.learning_rate / 2:g}'
    return f"give stage {stage.number + 1} of --stages {rate}", []

  def flags_for(self, plan, global_batch):
    """In per-rank mode also the steps, counted in global batches."""
    flags = super().flags_for(plan, global_batch)
    if self.global_batch_size is None:
      # Only what counts steps; the rest of the schedule has no unit.
      names = ["num_train_steps", "num_warmup_steps"]
      if SCHEDULES[self.lr_schedule][1] == "exp":
        names.append("lr_decay_steps")
      if self.num_decay_steps:
        names.append("num_decay_steps")
      warmup = self.warmup_of(self.num_train_steps)
      steps = {**vars(self), "num_warmup_steps": warmup}
      divisor = plan.divisor * global_batch / plan.records_per_update
      for name in names:
        value = training_plan.rounded_up(steps[name] / divisor)
        flags.append(f"--{name}={value}")
    return flags


def _check_needs(flag: str, needs: dict[str, Any]) -> None:
  """Raises `UserError` for the first need whose value is not true."""
  for need, has in needs.items():
    if not has:
      raise UserError(f"{flag} needs {need}")
