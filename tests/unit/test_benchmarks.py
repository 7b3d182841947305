"""What the benchmarks count."""

import json

import numpy as np
import pytest
import runs
import samples

import modeling
from benchmarks import reading
from benchmarks import step as bench_step
from common.tensorflow_v1 import tf
from model import model_flops
from records import record_shape


def test_model_flops_of_bert_base():
  """Hand-worked: 6 x weights x tokens, and 12 B S^2 H a layer of attention."""
  bert = modeling.BertConfig(vocab_size=30522)
  shape = record_shape.RecordShape(128, 20, 30522, examples_per_record=3)
  matmuls = model_flops.of_run(samples.fp32_run(bert), 8, shape)
  read = 20 + 3  # positions of the last layer that the heads read
  weights = 11 * (4 * 768**2 + 2 * 768 * 3072) * 8 * 128
  weights += 2 * 768**2 * 8 * 128  # the last layer's keys and values
  weights += (2 * 768**2 + 2 * 768 * 3072) * 8 * read
  weights += (768**2 + 768 * 30522) * 8 * 20
  weights += (768**2 + 768 * 2) * 8 * 3
  attention = 12 * 8 * 128 * (11 * 128 + read) * 768
  assert model_flops.total(matmuls) == 6 * weights + attention


def test_the_matmul_rate_runs_every_product():
  """TensorFlow would compute equal products once."""
  matmul = model_flops.Matmul(1, 1, 64, 64, 64, "b", tf.float32)
  rate = bench_step.MatmulRate([matmul], tf.ConfigProto())
  ((op, repeats),) = rate._runs
  metadata = tf.RunMetadata()
  options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
  rate._session.run(op, options=options, run_metadata=metadata)
  names = {
    node.node_name
    for device in metadata.step_stats.dev_stats
    for node in device.node_stats
  }
  assert len([name for name in names if "MatMul" in name]) == repeats > 10
  assert rate() > 0


def printed(module, tiny_run, *flags):
  """The lines of a benchmark, which are JSON; of a model that is trained."""
  process = runs.launch(
    [
      "-m", module, f"--bert_config_file={tiny_run[0]}",
      f"--input_file={tiny_run[1]}", "--max_seq_length=32",
      "--max_predictions_per_seq=5", "--train_batch_size=4", *flags,
    ]
  )  # fmt: skip
  assert process.returncode == 0, process.stderr[-3000:]
  return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.mark.slow
def test_bench_step_prints_one_line(tiny_run):
  flags = ["--num_accumulation_steps=2", "--rounds=1"]
  (result,) = printed("benchmarks.step", tiny_run, *flags)
  assert result["accumulation"] == 2 and result["updates"] == 4
  assert 0 < result["mfu"] < 1 and result["peak_memory_mb"] > 100
  assert result["seconds_p10"] <= result["seconds_median"]


def test_the_interval_of_a_median():
  """Of 100 values the 41st and the 60th: binomial(100, 1/2) is 50 +- 10."""
  got = reading.median_of("x", np.random.default_rng(0).permutation(100))
  assert got == {"x": 49.5, "x_95": [40.0, 59.0]}
