"""Fine-tunes BERT to find answers in paragraphs (SQuAD), on Horovod ranks.

  python run_squad.py --do_train --do_eval --do_predict \\
    --train_file=train-v1.1.json --predict_file=dev-v1.1.json ...

SQuAD 2.0, where a question may have no answer: --version_2_with_negative.
What the model in --output_dir was trained with need not be given again.
"""

import dataclasses
import functools

from common.tensorflow_v1 import tf
from finetuning import finetune, squad
from training import flags_common, train_loop, training_run

FLAGS = tf.flags.FLAGS


def define_flags() -> None:
  """google/bert's flags with its meaning where it has them, and ours."""
  flags = tf.flags
  made = {f.name: f.default for f in dataclasses.fields(squad.SquadConfig)}
  flags_common.define_finetuning_flags(max_seq_length=made["max_seq_length"])
  for part, what in (
    ("train", "train on"),
    ("eval", "evaluate on; default: --predict_file"),
    ("predict", "answer"),
  ):
    flags.DEFINE_string(f"{part}_file", None, f"SQuAD's JSON to {what}.")
  for name, what in (
    ("doc_stride", "Tokens from the begin of a window to that of the next."),
    ("max_query_length", "Most tokens of a question; longer ones are cut."),
    ("n_best_size", "Answers to keep of a question."),
    ("max_answer_length", "Most tokens of an answer."),
  ):
    flags.DEFINE_integer(name, made[name], what, lower_bound=1)
  flags.DEFINE_bool(
    "version_2_with_negative", False, "Questions may have no answer."
  )
  flags.DEFINE_float(
    "null_score_diff_threshold",
    made["null_score_diff_threshold"],
    "With --version_2_with_negative: no answer is given where its score is "
    "more than this above the best answer's.",
  )
  flags.adopt_module_key_flags(flags_common)  # so that --help shows them


def main(_) -> None:
  config = squad.SquadConfig.from_flags(FLAGS)
  task = squad.Squad(config)
  training_run.start(config, functools.partial(finetune.finetune, task))


if __name__ == "__main__":
  define_flags()
  train_loop.run_main(main)
