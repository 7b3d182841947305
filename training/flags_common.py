"""The absl flags that entry points share, each defined once.

Entry points call the groups they need before `app.run`; libraries never read
flags.
"""

import dataclasses

import mixed_precision
from common.tensorflow_v1 import tf
from gradients import lr_schedule
from gradients.distributed import AllreduceConfig
from gradients.optimizers import OPTIMIZERS, OptimizerConfig
from mixed_precision import LossScaleConfig
from model import encoder
from xla_patches import jit

flags = tf.flags


def define_model_flags() -> None:
  """Which network, and what its weights start from."""
  flags.DEFINE_string(
    "bert_config_file", None, "JSON file with the BERT config."
  )
  flags.DEFINE_string(
    "init_checkpoint",
    None,
    "Checkpoint whose weights a new run starts from (google/bert's or ours); "
    "what is loaded, missing and unused is listed. Ignored when --output_dir "
    "already has a checkpoint, which is then resumed.",
  )


def define_precision_flags() -> None:
  """In which types to compute; `mixed_precision` has the meanings."""
  made = {f.name: f.default for f in dataclasses.fields(LossScaleConfig)}
  flags.DEFINE_enum(
    "precision",
    "fp32",
    list(mixed_precision.TYPES),
    "Type of the matmuls; variables, softmax, GELU, layer norm, losses and "
    "gradients stay float32.",
  )
  flags.DEFINE_list(
    "precision_policy",
    [],
    "part=type,...: overrides for parts of the network: "
    + ", ".join(mixed_precision.PARTS),
  )
  flags.DEFINE_enum(
    "xla",
    "layers",
    list(jit.MODES),
    "What XLA compiles: nothing; what TensorFlow clusters; the work of a layer "
    "between its matmuls, and the update; forward and backward as one program.",
  )
  flags.DEFINE_list(
    "recompute",
    [],
    "What to compute again in the backward pass instead of keeping it in "
    "memory: " + ", ".join(encoder.RECOMPUTE),
  )
  flags.DEFINE_float(
    "loss_scale",
    made["loss_scale"],
    "fp16: factor on the loss; 0, the default, is dynamic.",
  )
  flags.DEFINE_float(
    "initial_loss_scale", made["initial_loss_scale"], "Of a dynamic one."
  )
  flags.DEFINE_integer(
    "loss_scale_window",
    made["loss_scale_window"],
    "Good updates in a row after which it doubles.",
  )
  flags.DEFINE_integer(
    "loss_scale_hysteresis",
    made["loss_scale_hysteresis"],
    "Overflows until it halves.",
  )
  flags.DEFINE_float("min_loss_scale", made["min_loss_scale"], "Its floor.")


def define_optimizer_flags() -> None:
  """The update rule; `optimizers.OptimizerConfig` has the meanings."""
  made = {f.name: f.default for f in dataclasses.fields(OptimizerConfig)}
  flags.DEFINE_enum(
    "optimizer", made["optimizer"], list(OPTIMIZERS), "The update rule."
  )
  flags.DEFINE_bool(
    "bias_correction", made["bias_correction"], "Of the moments."
  )
  flags.DEFINE_bool(
    "prenormalize",
    made["prenormalize"],
    "Divide the averaged gradient by its global norm (NVLAMB), not clip it.",
  )
  for name, what in (
    ("weight_decay_rate", "Decoupled; none on biases and layer norms."),
    ("beta_1", "Decay of the first moment."),
    ("beta_2", "Decay of the second moment."),
    ("epsilon", "Added to the root of the second moment."),
    ("min_trust_ratio", "LAMB: lowest ratio of weights' to update's norm."),
    ("max_trust_ratio", "LAMB: highest ratio."),
    ("clip_norm", "Highest global gradient norm; 0: no limit."),
  ):
    flags.DEFINE_float(name, made[name], what)


def define_allreduce_flags() -> None:
  """How ranks share gradients; `distributed.AllreduceConfig` has the meanings.

  Horovod's own switches (fusion buffer, cycle time, hierarchical all-reduce,
  autotune) are horovodrun's.
  """
  made = {f.name: f.default for f in dataclasses.fields(AllreduceConfig)}
  flags.DEFINE_integer(
    "allreduce_groups",
    made["allreduce_groups"],
    "All-reduces of an update, each when the last of its gradients is there; "
    "0: every gradient when it is there, fused by Horovod.",
  )
  flags.DEFINE_bool(
    "fp16_allreduce", made["fp16_allreduce"], "Send gradients as float16."
  )
  flags.DEFINE_bool(
    "adasum", made["adasum"], "Combine ranks' gradients by Adasum, not the sum."
  )
  flags.DEFINE_integer(
    "powersgd_rank",
    made["powersgd_rank"],
    "Send gradients as products of two matrices with so many columns "
    "(PowerSGD), for slow networks; 0: as they are.",
    lower_bound=0,
  )
  flags.DEFINE_integer(
    "zero",
    made["zero"],
    "1: each rank keeps and updates its share of the optimizer's state (ZeRO); "
    "checkpoints are the same.",
  )


def define_training_flags() -> None:
  """Batches, steps, optimizer, and the loop."""
  flags.DEFINE_string(
    "output_dir",
    None,
    "Folder for checkpoints, metrics and run.json. A run that finds its "
    "checkpoint there goes on from it.",
  )
  flags.DEFINE_integer(
    "train_batch_size",
    32,
    "Records of one rank's micro-batch (forward pass); with "
    "--global_batch_size at most so many.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "eval_batch_size", 32, "Examples of one rank's batch.", lower_bound=1
  )
  flags.DEFINE_integer(
    "num_accumulation_steps",
    None,
    "Micro-batches of one rank's update. Default: 1, or in global mode what "
    "the global batch needs.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "global_batch_size",
    None,
    "Global mode: examples of one update over all ranks and micro-batches; "
    "steps then count updates. Without it, per-rank mode: --num_train_steps "
    "and --num_warmup_steps are stated for one rank without accumulation and "
    "are divided by ranks x accumulation. A run keeps its global batch when it "
    "is resumed.",
    lower_bound=1,
  )
  flags.DEFINE_float("learning_rate", 5e-5, "Peak learning rate.")
  flags.DEFINE_enum(
    "lr_scaling",
    "none",
    sorted(lr_schedule.LR_SCALINGS),
    "Multiply the peak by 1, sqrt(ranks) or ranks; a run is then resumed on "
    "as many.",
  )
  flags.DEFINE_enum(
    "lr_schedule",
    "linear",
    list(lr_schedule.SCHEDULES),
    "How the rate rises to the peak and falls; see lr_schedule.py.",
  )
  flags.DEFINE_float(
    "lr_power",
    None,
    "Exponent of a polynomial decay. Default: 1 for linear, 0.5 for poly, 2 "
    "for warmup_exp_decay_poly.",
  )
  flags.DEFINE_float(
    "lr_decay_rate", 0.9, "Factor of an exponential decay, see lr_decay_steps."
  )
  flags.DEFINE_integer(
    "lr_decay_steps",
    1000,
    "Steps in which the rate falls by --lr_decay_rate; counted and divided as "
    "--num_train_steps.",
  )
  flags.DEFINE_float("lr_offset", 0.0, "Added to the schedule's rate.")
  flags.DEFINE_bool(
    "rewarmup",
    True,
    "With --init_checkpoint of another run: start the schedule anew. "
    "--norewarmup counts on from that run's update; what is then past a "
    "schedule's end has rate 0.",
  )
  flags.DEFINE_integer(
    "save_checkpoints_steps",
    1000,
    "Updates between checkpoints; one is always saved at the end.",
    lower_bound=0,
  )
  flags.DEFINE_integer(
    "keep_checkpoints", 5, "Newest checkpoints to keep.", lower_bound=1
  )
  flags.DEFINE_integer(
    "commit_every_steps",
    10,
    "Under horovodrun --min-np: updates between the states that each rank "
    "keeps in memory, to go back to when a rank is lost.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "log_every_steps", 10, "Updates between reports.", lower_bound=1
  )
  flags.DEFINE_integer(
    "eval_every_steps",
    0,
    "Updates between evaluations while training, in pre-training one before "
    "the first update included; 0: only at the end (with --do_eval).",
    lower_bound=0,
  )
  flags.DEFINE_integer(
    "early_stopping_evaluations",
    0,
    "Stop when so many evaluations in a row (--eval_every_steps) were no "
    "better than the best; 0: never.",
    lower_bound=0,
  )
  flags.DEFINE_float(
    "peak_tflops",
    None,
    "10^12 FLOP/s that a rank could reach, for the reports' mfu; "
    "benchmarks/step.py prints what matmuls reach on this machine "
    "(matmul_gflop_per_second / 1000).",
  )
  flags.DEFINE_list(
    "profile_steps",
    [],
    "FIRST,LAST: updates of the run, as reports number them, to record for the "
    "trace viewer of TensorBoard.",
  )
  flags.DEFINE_integer(
    "seed", 12345, "Of initial weights, order of records and dropout."
  )
  flags.DEFINE_integer(
    "num_threads",
    0,
    "CPU threads for one op of a rank; 0: the host's cores divided by its "
    "ranks (of an elastic run, by those there when this one joined). With "
    "several ranks two ops may run at once.",
    lower_bound=0,
  )


def define_finetuning_flags(max_seq_length: int) -> None:
  """What run_classifier.py and run_squad.py share; google/bert's names."""
  define_model_flags()
  define_precision_flags()
  define_optimizer_flags()
  define_allreduce_flags()
  define_training_flags()
  flags.DEFINE_bool("do_train", False, "Train.")
  flags.DEFINE_bool(
    "do_eval", False, "Evaluate: while training, and the best at the end."
  )
  flags.DEFINE_bool("do_predict", False, "Predict, with the best weights.")
  flags.DEFINE_string(
    "vocab_file",
    None,
    "WordPiece vocabulary that the checkpoint was trained with. A run folder "
    "keeps a copy, which it uses without the flag.",
  )
  flags.DEFINE_string(
    "spm_model_file", None, "The same for a SentencePiece model."
  )
  flags.DEFINE_bool(
    "do_lower_case", True, "Lower-case the text, as uncased models want it."
  )
  flags.DEFINE_integer(
    "max_seq_length",
    max_seq_length,
    "Most tokens of an example, and of a record of several.",
    lower_bound=4,
  )
  flags.DEFINE_integer(
    "examples_per_record",
    32,
    "Pack up to so many examples into a record, so that padding does not set "
    "the speed; losses stay those of the examples apart. 1: do not pack.",
    lower_bound=1,
  )
  flags.DEFINE_float("num_train_epochs", 3.0, "Passes over the training set.")
  flags.DEFINE_float(
    "warmup_proportion", 0.1, "Share of the updates that is warm-up."
  )
  flags.DEFINE_float(
    "eval_every_epochs",
    1.0,
    "With --do_eval: epochs between evaluations while training, of which the "
    "best is kept; 0: only at the end. --eval_every_steps wins.",
  )
  flags.mark_flag_as_required("bert_config_file")


def define_source_flags() -> None:
  """What `model_source.Given` has; for commands about a trained model."""
  found = "Default: as found beside the model."
  flags.DEFINE_string(
    "bert_config_file", None, f"JSON file with the BERT config. {found}"
  )
  flags.DEFINE_string(
    "vocab_file",
    None,
    "WordPiece vocabulary that the model was trained with. Default: as found "
    "beside the model or its training data.",
  )
  flags.DEFINE_string(
    "spm_model_file", None, "The same for a SentencePiece model."
  )
  flags.DEFINE_bool(
    "do_lower_case",
    None,
    "Lower-case the text. Default: as found beside the model, or else true.",
  )
