"""run_pretraining.py that writes down which records each update consumed.

  RECORDED_RUN=log python -m benchmarks.faults.recorded_run --do_train ...

Takes every flag of run_pretraining.py. For records whose first token is their
number, as `fake_records` writes them. One JSON line in log-RANK for each
micro-batch that this rank has run: the update, the micro-batch's number, the
records, and a checksum of everything that the model was given, masks too. After
each there is a short rest, so that faults can strike between two.
"""

import collections
import contextlib
import dataclasses
import json
import os
import time
import zlib

import numpy as np

import input_pipeline
import run_pretraining
from common.tensorflow_v1 import tf
from interop import run_settings
from training import train_loop

LOG = "RECORDED_RUN"  # environment: where to write
REST_SECONDS = 0.05


def read(path: str) -> dict[int, list]:
  """Update -> its micro-batches, of the lines that were written whole."""
  updates = collections.defaultdict(list)
  with contextlib.suppress(FileNotFoundError), open(path) as f:
    for line in f:
      if line.endswith("\n"):
        update, *micro_batch = json.loads(line)
        updates[update].append(micro_batch)
  return updates


def record_consumption(path: str) -> None:
  """Has all sessions to come write down what their micro-batches consume."""
  # One write() a line, so that no kill can leave a part of one.
  log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  make, run = input_pipeline.training_batches, tf.Session.run
  noted, graphs = [], []

  def note(step, number, *arrays):
    checksum = 0
    for array in arrays:
      checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
    numbers = arrays[0][:, 0].tolist()
    noted.append([int(step) + 1, int(number), numbers, checksum])
    return np.int32(0)

  def training_batches(*arguments):
    batches = make(*arguments)
    micro = batches.next
    graphs.append(micro.number.graph)
    # The update waits for the batch and the batch for the note, which
    # therefore sees the step before.
    step = tf.convert_to_tensor(tf.train.get_or_create_global_step())
    noting = tf.numpy_function(
      note, [step, micro.number, *micro.batch], "int32"
    )
    with tf.control_dependencies([noting]):
      ids = tf.identity(micro.batch.input_ids)
    batch = micro.batch._replace(input_ids=ids)
    return dataclasses.replace(batches, next=micro._replace(batch=batch))

  def run_and_write(session, *arguments, **options):
    if session.graph not in graphs:  # another thread's, that saves
      return run(session, *arguments, **options)
    noted.clear()
    got = run(session, *arguments, **options)
    for line in noted:  # what has been run; an error leaves none
      os.write(log, (json.dumps(line) + "\n").encode())
      time.sleep(REST_SECONDS)
    return got

  input_pipeline.training_batches = training_batches
  tf.Session.run = run_and_write


if __name__ == "__main__":
  command = run_settings.read_command(run_pretraining.PretrainingConfig)
  rank = os.environ.get("HOROVOD_RANK", "0")
  record_consumption(f"{os.environ[LOG]}-{rank}")
  train_loop.run_read(lambda: run_pretraining.main(command))
