"""The training step's graph as a run beside a GPU has it, without that GPU."""

from unittest import mock

import input_pipeline
import run_pretraining
from checkpoints import checkpointing
from common.tensorflow_v1 import tf
from config import record_shapes
from training import plans, train_loop, training_run
from xla_patches import jit


def run_main(main) -> None:
  """Runs a command with run_pretraining's flags that only builds its graph."""
  tf.flags.FLAGS.set_default("dry_run", True)
  tf.flags.FLAGS.set_default("num_warmup_steps", 0)
  train_loop.run_main(main)


def beside_gpu():
  """Inside, a graph is built as if this process had a GPU."""
  return mock.patch.object(
    tf.config, "list_physical_devices", return_value=["GPU"]
  )


def build(config, comm) -> list:
  """What an update fetches, with one micro-batch, in a new graph.

  Its input comes from the host, and collectives are those of NCCL. Shapes are
  fixed: all positions have logits, which saves the four launches and the copy
  to the device that choose them.
  """
  shape = record_shapes.of_patterns(config.input_file, config)
  plan = plans.of_run(config, None, comm.data_parallel.size)
  with training_run.graph(config), jit.mode(config.xla, fixed_shapes=True):
    examples = input_pipeline.fake_batch(shape, plan.micro_batch)
    fixed = input_pipeline.fixed_micro_batch(examples, plan.accumulation)
    with tf.device("/cpu:0"):  # where tf.data's iterator is
      micro = tf.nest.map_structure(
        lambda t: tf.placeholder(t.dtype, t.shape), fixed
      )
    with beside_gpu():
      ops = run_pretraining.training_step(
        config, shape, micro, checkpointing.TrainingState(), plan, comm
      )
    return tf.nest.flatten(ops.fetches())
