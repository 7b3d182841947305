"""The absl flags that entry points share, each defined once.

Entry points call the groups they need before `app.run`; libraries never read
flags.
"""

import lr_schedule
from tensorflow_v1 import tf

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
    "Examples of one rank's micro-batch (forward pass).",
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
    "are divided by ranks x accumulation.",
    lower_bound=1,
  )
  flags.DEFINE_float("learning_rate", 5e-5, "Peak learning rate.")
  flags.DEFINE_enum(
    "lr_scaling",
    "none",
    sorted(lr_schedule.LR_SCALINGS),
    "Multiply the peak by 1, sqrt(ranks) or ranks.",
  )
  flags.DEFINE_integer("num_train_steps", 100000, "Steps of the whole run.")
  flags.DEFINE_integer("num_warmup_steps", 10000, "Steps of warm-up in it.")
  flags.DEFINE_float(
    "clip_norm", 1.0, "Highest global gradient norm; 0: no limit."
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
    "log_every_steps", 10, "Updates between reports.", lower_bound=1
  )
  flags.DEFINE_integer(
    "eval_every_steps",
    0,
    "Updates between evaluations while training, one before the first update "
    "included; 0: only at the end (with --do_eval).",
    lower_bound=0,
  )
  flags.DEFINE_integer(
    "seed", 12345, "Of initial weights, order of records and dropout."
  )
  flags.DEFINE_integer(
    "num_threads",
    0,
    "CPU threads of one rank; 0: the host's cores divided by its ranks.",
    lower_bound=0,
  )
