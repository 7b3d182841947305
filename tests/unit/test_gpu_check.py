"""What benchmarks/ count of GPUs, where there is none."""

import dataclasses
import json
import pathlib
import re

import pytest
import runs

import modeling
from benchmarks.gpu import check, chips, costs, hlo, placement
from common.tensorflow_v1 import tf
from gradients.distributed import Comm

# Of configs/bert_tiny.json, 4 x 16 tokens, bf16: launches, programs, copies to
# the device and to the host, ops of layers without a kernel.
COUNTS = {
  "off": (1381, 0, 49, 9, 0),
  "layers": (234, 46, 11, 5, 0),
  "step": (57, 4, 10, 5, 0),
}


@pytest.fixture
def tiny(tmp_path):
  """A config of 2 layers of width 128."""
  path = f"{runs.ROOT}/configs/bert_tiny.json"
  made = runs.config(
    (path, ""), tmp_path, do_train=False, dry_run=True,
    precision="bf16", train_batch_size=4, global_batch_size=4,
    max_seq_length=16, max_predictions_per_seq=3,
  )  # fmt: skip
  bert = modeling.BertConfig.from_json_file(path)
  return dataclasses.replace(made, bert=bert)


@pytest.mark.parametrize("mode", COUNTS)
def test_what_a_gpu_launches_and_copies(tiny, mode):
  line = check.count(dataclasses.replace(tiny, xla=mode), Comm())
  names = "launches programs to_device to_host without_kernel_in_layers"
  assert tuple(line[name] for name in names.split()) == COUNTS[mode]
  assert line["to_device_mb"] < 1


def test_the_kernels_are_those_of_the_gpu_wheel():
  wanted = (pathlib.Path(runs.ROOT) / "requirements/gpu.txt").read_text()
  version = re.search(r"tensorflow\[and-cuda\]==(\S+)", wanted).group(1)
  first, *_ = placement.TABLE.read_text().splitlines()
  assert first == f"# TensorFlow {version}"


def test_placement_of_a_few_ops():
  """float32 is the device's; int32 is computed in the host's memory."""
  with tf.Graph().as_default():
    with tf.device("/cpu:0"):
      x, n = tf.placeholder(tf.float32, [4, 4]), tf.placeholder(tf.int32, [4])
    product = tf.matmul(x, x)  # x goes to the device, once
    shifted = product + tf.cast(n + 1, tf.float32)  # so does n + 1
    best = tf.argmax(shifted, axis=1)
    first = tf.argmax(n)  # no kernel for int32
    count = placement.Placement([shifted, best, first])
  assert [op.type for op in count.without_kernel] == ["ArgMax"]
  assert {t.op.type for t in count.to_device} == {"Placeholder", "AddV2"}
  assert {t.op.name for t in count.to_host} == {shifted.op.name, best.op.name}
  launched = sorted(op.type for op in count.launched)
  assert launched == ["AddV2", "ArgMax", "Cast", "MatMul"]
  assert sum(map(placement.size, count.to_device)) == 4 * 16 + 4 * 4


HLO = """
%fused (p.0: bf16[64,8], p.1: bf16[8,32]) -> f32[64,32] {
  %p.0 = bf16[64,8]{1,0} parameter(0)
  %p.1 = bf16[8,32]{1,0} parameter(1)
  ROOT %d = f32[64,32]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}
}

%looked_up (p.2: f32[1000,32], p.3: s32[64]) -> f32[64,32] {
  %p.2 = f32[1000,32]{1,0} parameter(0)
  %p.3 = s32[64]{0} parameter(1)
  ROOT %g = f32[64,32]{1,0} gather(%p.2, %p.3), offset_dims={1}
}

%kept (p.4: f32[64,32]) -> pred[64,32] {
  %p.4 = f32[64,32]{1,0} parameter(0)
  ROOT %m = pred[64,32]{1,0} compare(%p.4, %p.4), direction=LT
}

ENTRY %main (a: bf16[64,8], b: bf16[8,32], t: f32[1000,32], i: s32[64]) -> () {
  %a = bf16[64,8]{1,0} parameter(0)
  %b = bf16[8,32]{1,0} parameter(1)
  %t = f32[1000,32]{1,0} parameter(2)
  %i = s32[64]{0} parameter(3)
  %f = f32[64,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused, k="__triton"
  %r = f32[64,32]{1,0} fusion(%t, %i), kind=kLoop, calls=%looked_up
  %k = pred[64,32]{1,0} fusion(%r), kind=kLoop, calls=%kept
  %c = (f32[8,32]{1,0}, s8[99]{0}) custom-call(%a, %f), \
custom_call_target="__cublas$gemm", \
backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}
  ROOT %x = () tuple()
}
"""


def test_costs_of_a_module():
  dot, rows, mask, call = costs.Module(HLO).kernels()
  assert dot.flops == call.flops == 2 * 64 * 8 * 32
  assert (dot.type, dot.library) == ("bf16", "triton")
  assert (call.type, call.library) == ("bf16", "cublas$gemm")
  result = 4 * 64 * 32
  assert dot.bytes == 2 * (64 * 8 + 8 * 32) + result
  assert rows.bytes == result + 4 * 64 + result  # not the whole table
  assert mask.bytes == result + 64 * 32
  assert call.bytes == 2 * 64 * 8 + result + 4 * 8 * 32  # no work space
  chip = chips.CHIPS["h100"]
  assert mask.seconds(chip) == mask.bytes / 3.35e12
  line = costs.summary([dot, rows, mask, call])
  assert line["gemms"] == {"triton bf16": 1, "cublas$gemm bf16": 1}
  assert line["kernels"] == 4


def test_a_module_without_copies():
  program = hlo.hlo_pb2.HloModuleProto()
  computation = program.computations.add(root_id=4)
  for number, opcode, operands in (
    (1, "parameter", []), (2, "copy", [1]), (3, "negate", [2]), (4, "copy", [3])
  ):  # fmt: skip
    computation.instructions.add(id=number, opcode=opcode, operand_ids=operands)
  made = hlo.without_copies(program.SerializeToString())
  (left,) = hlo.hlo_pb2.HloModuleProto.FromString(made).computations
  assert [i.opcode for i in left.instructions] == ["parameter", "negate"]
  assert left.root_id == 3 and left.instructions[1].operand_ids == [1]


@pytest.mark.slow
def test_bert_tiny_compiles_for_gpus():
  python = pathlib.Path(runs.ROOT, check.PYTHON)
  if not python.exists():
    pytest.skip(f"{check.PYTHON} is missing: benchmarks/gpu/check.py")
  process = runs.launch(
    [
      "-m", "benchmarks.gpu.check", "--bert_config_file=configs/bert_tiny.json",
      "--gpus=h100,a100", "--max_seq_length=16",
      "--max_predictions_per_seq=3",
      "--train_batch_size=4", "--precision=bf16", "--xla=step",
    ]
  )  # fmt: skip
  assert process.returncode == 0, process.stderr[-3000:]
  for line in map(json.loads, process.stdout.splitlines()):
    assert line["compiles"] and line["fp32_gemms"] <= 2
    assert line["teraflop"] == pytest.approx(line["model_teraflop"], abs=1e-4)
    assert line["kernels"] < 350 and line["peak_memory_gb"] < 0.2
