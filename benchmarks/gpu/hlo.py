"""The HLO module of a training step, as it is before XLA optimizes."""

# tf.compat.v1 has no switch to eager mode, nor XLA's messages.
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python.eager import context

import input_pipeline
import modeling
import run_pretraining
from checkpoints import checkpointing
from common.tensorflow_v1 import tf
from config import record_shapes
from config.pretraining import PretrainingConfig
from gradients import distributed
from training import plans
from xla_patches import jit


class _Variables:
  """`tf.get_variable` for a function that is traced outside of a graph.

  The variables live outside of the function, so that they are parameters and
  results of its program.
  """

  def __init__(self):
    self._by_name = {}

  def __call__(self, getter, name, shape, dtype=tf.float32, **kwargs):
    del getter
    trainable = kwargs.get("trainable") is not False
    if name not in self._by_name:
      if shape is None:  # of a constant
        initial = kwargs["initializer"]
        shape, dtype = initial.shape, initial.dtype
      with tf.init_scope():
        self._by_name[name] = tf.Variable(
          tf.zeros(shape, dtype),
          name=name,
          trainable=trainable,
          use_resource=True,
        )
    variable = self._by_name[name]
    if trainable:
      collection = tf.get_collection_ref(tf.GraphKeys.TRAINABLE_VARIABLES)
      if not any(variable is v for v in collection):
        collection.append(variable)
    return variable


def whole_step(config: PretrainingConfig) -> bytes:
  """The serialized module of a whole update of one micro-batch."""
  shape = record_shapes.of_patterns(config.input_file, config)
  plan = plans.of_run(config, None, 1)
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

  # A graph of its own, since functions share their graph's collections.
  fixed = jit.mode("off", fixed_shapes=True)
  with tf.Graph().as_default(), context.eager_mode(), fixed:
    function = tf.function(step, autograph=False, jit_compile=True)
    tensors = {name: tf.constant(value) for name, value in batch.items()}
    module = function.experimental_get_compiler_ir(**tensors)(
      stage="hlo_serialized"
    )
  return without_copies(module)


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

    def origin(number, source=source):
      while number in source:
        number = source[number]
      return number

    kept = [i for i in computation.instructions if i.id not in source]
    for instruction in kept:
      instruction.operand_ids[:] = map(origin, instruction.operand_ids)
      before = instruction.control_predecessor_ids
      before[:] = map(origin, before)
    computation.root_id = origin(computation.root_id)
    del computation.instructions[:]
    computation.instructions.extend(kept)
  return program.SerializeToString()
