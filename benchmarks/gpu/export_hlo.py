"""Writes the whole training step as one XLA module, to be timed by run_hlo.py.

  python -m benchmarks.gpu.export_hlo \\
    --bert_config_file=configs/bert_large.json \\
    --train_batch_size=32 --max_seq_length=128 --precision=bf16 --module=step

Takes every flag of run_pretraining.py; forward, backward and update of one
micro-batch on one rank, in one program. Writes step.hlo, a serialized
HloModuleProto as before XLA's optimizations, which any XLA can compile for the
device that it has, and step.json: the module's parameters (what each is, its
shape and type, what to fill it with), which of its results take the place of
which parameters in the next step, and the model's arithmetic.
"""

import os
import pathlib

# tf.compat.v1 has no switch to eager mode, nor XLA's messages.
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python.eager import context

import input_pipeline
import modeling
import run_pretraining
from benchmarks.gpu import training_graph
from checkpoints import checkpointing
from common import console, json_files, settings
from common.tensorflow_v1 import tf
from config.pretraining import PretrainingConfig
from gradients import distributed
from model import model_flops
from records import record_shape
from training import plans
from xla_patches import jit

FLAGS = tf.flags.FLAGS


class _Variables:
  """`tf.get_variable` for a function that is traced outside of a graph.

  The variables live outside of the function, so that they are parameters and
  results of its program.
  """

  def __init__(self):
    self.by_name = {}

  def __call__(self, getter, name, shape, dtype=tf.float32, **kwargs):
    del getter
    trainable = kwargs.get("trainable") is not False
    if name not in self.by_name:
      if shape is None:  # of a constant
        initial = kwargs["initializer"]
        shape, dtype = initial.shape, initial.dtype
      with tf.init_scope():
        self.by_name[name] = tf.Variable(
          tf.zeros(shape, dtype),
          name=name,
          trainable=trainable,
          use_resource=True,
        )
    variable = self.by_name[name]
    if trainable:
      collection = tf.get_collection_ref(tf.GraphKeys.TRAINABLE_VARIABLES)
      if not any(variable is v for v in collection):
        collection.append(variable)
    return variable


def trace(config: PretrainingConfig, plan, shape):
  """The step as a compiled function of a batch.

  Returns:
    The function, the batch's arguments by name, and the variables by name.
  """
  variables = _Variables()
  with tf.Graph().as_default(), tf.Session() as session:
    examples = input_pipeline.fake_batch(shape, plan.micro_batch)
    micro = input_pipeline.fixed_micro_batch(examples, 1)
    batch = session.run(micro.batch._asdict())

  def step(**columns):
    with tf.variable_scope("", custom_getter=variables):
      number = tf.convert_to_tensor(tf.train.get_or_create_global_step())
      batch = modeling.PretrainingBatch(**columns)
      weights = input_pipeline.pretraining_weights(batch)
      micro = input_pipeline.MicroBatch(
        batch=batch,
        number=tf.cast(number, tf.int32),
        weights=tf.reduce_sum(weights, axis=0),
        records=tf.constant(plan.records_per_update, tf.int64),
      )
      state = checkpointing.TrainingState()
      ops = run_pretraining.training_step(
        config, shape, micro, state, plan, distributed.Comm()
      )
      with tf.control_dependencies([ops.update]):
        return tf.identity(ops.sums["masked_lm_loss"])

  function = tf.function(step, autograph=False, jit_compile=True)
  return function, batch, variables.by_name


def without_copies(module: bytes) -> bytes:
  """`module` without copies, which do nothing before XLA's optimizations.

  TensorFlow writes thousands, and jaxlib's conversion to StableHLO makes
  operations of them that its clients of devices refuse.
  """
  program = hlo_pb2.HloModuleProto.FromString(module)
  for computation in program.computations:
    source = {
      instruction.id: instruction.operand_ids[0]
      for instruction in computation.instructions
      if instruction.opcode == "copy"
    }

    def of(number, source=source):
      while number in source:
        number = source[number]
      return number

    kept = [i for i in computation.instructions if i.id not in source]
    for instruction in kept:
      instruction.operand_ids[:] = map(of, instruction.operand_ids)
      before = instruction.control_predecessor_ids
      before[:] = map(of, before)
    computation.root_id = of(computation.root_id)
    del computation.instructions[:]
    computation.instructions.extend(kept)
  return program.SerializeToString()


def export(config: PretrainingConfig) -> tuple[bytes, dict]:
  """The step's module, and what step.json says of it."""
  shape = record_shape.of_run(config.input_file, config)
  plan = plans.of_run(config, None, 1)
  # A graph of its own, since functions share their graph's collections.
  fixed = jit.mode("off", fixed_shapes=True)
  with tf.Graph().as_default(), context.eager_mode(), fixed:
    function, batch, variables = trace(config, plan, shape)
    tensors = {name: tf.constant(value) for name, value in batch.items()}
    module = function.experimental_get_compiler_ir(**tensors)(
      stage="hlo_serialized"
    )
    captures = function.get_concrete_function(**tensors).graph.captures
    names = {id(v.handle): name for name, v in variables.items()}
    captured = [names[id(outer)] for outer, _ in captures]
    is_written = [
      {op.type for op in inner.consumers()} != {"ReadVariableOp"}
      for _, inner in captures
    ]
  fills = {
    "input_ids": _integers(config.bert.vocab_size),
    "masked_lm_ids": _integers(config.bert.vocab_size),
    "masked_lm_positions": _integers(shape.max_seq_length),
    "segment_ids": _integers(2),
    "next_sentence_labels": _integers(2),
  }
  parameters = [
    _parameter(name, value, fills.get(name, {"kind": "ones"}))
    for name, value in sorted(batch.items())
  ]
  parameters += [
    _parameter(name, variables[name], variable_fill(name, variables, config))
    for name in captured
  ]
  # The loss, then each variable that the step writes.
  results = [None]
  results += [len(batch) + i for i, written in enumerate(is_written) if written]
  matmuls = model_flops.of_run(config, plan.micro_batch, shape)
  return without_copies(module), {
    "results": results,
    "bert_config": os.path.basename(FLAGS.bert_config_file),
    "precision": config.precision,
    "micro_batch": plan.micro_batch,
    "seq_length": shape.max_seq_length,
    "predictions": shape.max_predictions_per_seq,
    "model_gflop": model_flops.total(matmuls) / 1e9,
    "matmuls": [
      [m.times, m.batch, m.m, m.k, m.n, m.transpose, m.dtype.name]
      for m in matmuls
    ],
    "parameters": parameters,
  }


def _integers(below: int) -> dict:
  return {"kind": "ints", "below": below}


def variable_fill(name: str, variables: dict, config) -> dict:
  """As a training begins: random weights, the rest 0 or 1."""
  if name.endswith("gamma"):
    return {"kind": "ones"}
  is_matrix = len(variables[name].shape) == 2
  if is_matrix and not name.endswith(("adam_m", "adam_v")):
    return {"kind": "normal", "stddev": config.bert.initializer_range}
  return {"kind": "zeros"}


def _parameter(name: str, value, fill: dict) -> dict:
  """One parameter and what to fill it with."""
  shape = [int(size) for size in value.shape]
  return {"name": name, "shape": shape, "dtype": value.dtype.name, "fill": fill}


def main(_) -> None:
  module, about = export(PretrainingConfig.from_flags(FLAGS))
  pathlib.Path(FLAGS.module + ".hlo").write_bytes(module)
  json_files.write(FLAGS.module + ".json", about)
  console.say(
    distributed.Comm(),
    f"{FLAGS.module}.hlo   {len(module) / 2**20:.1f} MB, "
    f"{len(about['parameters'])} parameters",
    f"{FLAGS.module}.json  what they are",
    f"to time it: python benchmarks/gpu/run_hlo.py --module={FLAGS.module}",
  )


if __name__ == "__main__":
  settings.define_flags(PretrainingConfig)
  tf.flags.DEFINE_string("module", "step", "Write MODULE.hlo and MODULE.json.")
  training_graph.run_main(main)
