"""Published throughputs of BERT's pre-training, and what hardware they had.

For `scaling_model` to predict. What goes into a prediction is a table's
`single`, the throughput of one GPU (or of one host with long accumulation) that
the same source has, and the vendors' figures of `HARDWARE`; never its `rows`.
"""

from typing import NamedTuple


class Hardware(NamedTuple):
  """Nominal figures, each way; nothing is taken off for protocols.

  NVIDIA's data sheets: DGX-1, DGX-2, DGX A100, Tesla P100.
  """

  network: float  # bytes/s of a host
  inside: float  # bytes/s of a GPU to the others of its host
  memory: float  # bytes/s of a GPU


_EDR, _HDR = 100e9 / 8, 200e9 / 8  # bytes/s of an InfiniBand adapter
HARDWARE = {
  "DGX-1 V100": Hardware(4 * _EDR, 150e9, 900e9),
  "DGX-2 V100": Hardware(8 * _EDR, 150e9, 900e9),
  "DGX A100 40G": Hardware(8 * _HDR, 300e9, 1555e9),
  # "close to DGX-1", with one adapter: reports/ of Oneflow-Inc/DLPerf
  "8 V100, one EDR": Hardware(_EDR, 150e9, 900e9),
}

# Seconds of a message, as NCCL counts them itself (NVIDIA/nccl,
# src/graph/tuning.cc, `hwLat`, rings of its protocol Simple).
LATENCY, LATENCY_INSIDE = 9.6e-6, 3.4e-6

# Bytes of GPU memory an optimizer reads or writes for a weight: float32
# gradient, weight and moments read, the last three written, and for LAMB, whose
# norms come between, the update written and read with the weight again.
UPDATE_BYTES = 40


class Table(NamedTuple):
  """One column of a published table."""

  name: str
  source: str
  hardware: str  # in HARDWARE
  bert: str  # in configs/
  seq_length: int
  predictions: int
  micro_batch: int
  single: float  # examples/s of one GPU, from the same source
  wire_bytes: int
  overlaps: bool
  per_host: int  # GPUs
  rows: tuple  # (hosts, micro-batches of an update, examples/s)


_TF1 = "NVIDIA/DeepLearningExamples TensorFlow/LanguageModeling/BERT/README.md"
_BIO = (
  "NVIDIA/DeepLearningExamples "
  "TensorFlow/LanguageModeling/BERT/biobert/README.md"
)
_PYTORCH = "NVIDIA/DeepLearningExamples PyTorch/LanguageModeling/BERT/README.md"
_DLPERF = (
  "Oneflow-Inc/DLPerf NVIDIADeepLearningExamples/TensorFlow/LanguageModeling/"
  "BERT/README.md"
)


def _nvidia(
  name, source, hardware, bert, per_host, sizes, single, *throughputs
):
  """A table with the global batch of NVIDIA's recipe, 65,536 or 32,768.

  NVIDIA reduces after accumulation (--allreduce_post_accumulation), so nothing
  overlaps, and we take it that mixed precision sends float16.
  """
  seq_length, micro_batch, wire_bytes = sizes
  batch = 65536 if seq_length == 128 else 32768
  rows = tuple(
    (hosts, max(1, batch // (hosts * per_host * micro_batch)), speed)
    for hosts, speed in throughputs
  )
  return Table(
    *(name, source, hardware, bert, seq_length),
    *(20 if seq_length == 128 else 80, micro_batch, single, wire_bytes, False),
    *(per_host, rows),
  )


def _dlperf(name, micro_batch, wire_bytes, single, *throughputs):
  """A table of TensorFlow 1.15 and Horovod 0.19 without accumulation.

  wire_bytes: its scripts' --use_fp16 compresses gradients.
  """
  return Table(
    *(f"BERT-Base {name}", _DLPERF, "8 V100, one EDR", "bert_base.json", 128),
    *(20, micro_batch, single, wire_bytes, True, 8),
    tuple((hosts, 1, speed) for hosts, speed in throughputs),
  )


_LARGE, _BASE = "bert_large.json", "bert_base.json"
_A100, _DGX1, _DGX2 = "DGX A100 40G", "DGX-1 V100", "DGX-2 V100"

TABLES = (
  _nvidia(
    *("Large fp16", _TF1, _A100, _LARGE, 8, (128, 64, 2), 356.845),
    *((1, 2871.89), (4, 11159.0), (16, 41144.0), (32, 77479.87)),
  ),
  # Its rows of 512 on several hosts have a global batch of 65,536.
  Table(
    *("Large fp16", _TF1, _A100, _LARGE, 512, 80, 16, 70.856, 2, False, 8),
    (
      (1, 256, 572.112),
      (4, 128, 2197.44),
      (16, 32, 8723.1),
      (32, 16, 16705.0),
    ),
  ),
  _nvidia(
    *("Large tf32", _TF1, _A100, _LARGE, 8, (128, 64, 4), 238.10),
    *((1, 1889.71), (4, 7532.0), (16, 28605.62), (32, 53585.82)),
  ),
  # One host's is a DGX-2's, 188.04 of one GPU; several are DGX-2H, which are
  # faster by themselves.
  _nvidia(
    *("Large fp16", _TF1, _DGX2, _LARGE, 16, (128, 64, 2), 3081.69 / 16),
    *((4, 13192.0), (16, 48223.0), (32, 86673.64)),
  ),
  _nvidia(
    *("Large fp16", _TF1, _DGX2, _LARGE, 16, (512, 8, 2), 577.79 / 16),
    *((4, 2284.23), (16, 8853.0), (32, 17059.0)),
  ),
  # The accumulation is not in the table; that of the recipe is assumed.
  _nvidia(
    *("Base fp16", _BIO, _DGX1, _BASE, 8, (128, 64, 2), 2762.06 / 8),
    *((4, 10283.08), (16, 39051.69), (32, 76077.39)),
  ),
  _nvidia(
    *("Base fp16", _BIO, _DGX1, _BASE, 8, (512, 8, 2), 432.33 / 8),
    *((4, 1593.0), (16, 5941.82), (32, 11483.73)),
  ),
  _nvidia(
    *("Base fp32", _BIO, _DGX1, _BASE, 8, (128, 32, 4), 744.48 / 8),
    *((4, 2762.88), (16, 10715.14), (32, 21104.87)),
  ),
  _nvidia(
    *("Large fp16", _PYTORCH, _DGX1, _LARGE, 8, (128, 16, 2), 125.44),
    *((1, 919.04), (4, 3089.76), (16, 12144.64)),
  ),
  _nvidia(
    *("Large fp16", _PYTORCH, _DGX1, _LARGE, 8, (512, 4, 2), 26.64),
    *((1, 194.56), (4, 700.16), (16, 2746.368)),
  ),
  _nvidia(
    *("Large fp16", _PYTORCH, _DGX2, _LARGE, 16, (128, 64, 2), 3379.2 / 16),
    *((4, 12709.88), (16, 51937.28), (64, 188088.32)),
  ),
  _nvidia(
    *("Large fp16", _PYTORCH, _DGX2, _LARGE, 16, (512, 8, 2), 625.66 / 16),
    *((4, 2386.38), (16, 9932.8), (64, 37478.4)),
  ),
  _dlperf(
    "fp32, batch 32", 32, 4, 112.76, (1, 855.45), (2, 1576.88), (4, 2727.9)
  ),
  _dlperf(
    "fp32, batch 48", 48, 4, 107.33, (1, 790.03), (2, 1404.04), (4, 3089.74)
  ),
  _dlperf(
    "fp16, batch 64", 64, 2, 183.25, (1, 1452.59), (2, 2653.74), (4, 5189.07)
  ),
  # XLA's clusters hold gradients back until the backward pass is over.
  _dlperf(
    *("fp16 XLA, batch 64", 64, 2, 422.53),
    *((1, 3112.73), (2, 5050.86), (4, 9409.2)),
  )._replace(overlaps=False),
)


class Phase(NamedTuple):
  """A phase of DeepSpeed's pre-training of BERT-Large."""

  seq_length: int
  predictions: int
  micro_batch: int
  batch: int  # examples of an update
  examples: float
  single: float  # examples/s of one V100, ten micro-batches an update


# deepspeedai/DeepSpeed docs/_tutorials/bert-pretraining.md. It has 18 to 22
# million examples for the second phase; we take 20.
DEEPSPEED = "deepspeedai/DeepSpeed docs/_tutorials/bert-pretraining.md"
DEEPSPEED_PHASES = (
  Phase(128, 20, 64, 65536, 403e6, 272.0),
  Phase(512, 80, 8, 32768, 20e6, 52.0),
)
DEEPSPEED_HOURS = (  # hosts of 16 V100, hours
  (1, 33 + 13 / 60),
  (4, 8 + 41 / 60),
  (16, 144 / 60),
  (64, 44 / 60),
)

# Perseus-BERT, 16 P100 in two hosts, sequence 256, batch 22, float32: five
# times Horovod 0.15.2's speed. It has no speed of one GPU and no network rate,
# so only what communication can be of it is asked: a P100 is taken at half of
# its 9.3e12 FLOP/s (PCIe board), Horovod without any overlap.
PERSEUS = (
  "https://www.alibabacloud.com/blog/"
  "perseus-bert-industry-leading-bert-training-solution-optimized-for-"
  "performance_594717"
)
PERSEUS_RATIO = 5.0
PERSEUS_FLOPS = 0.5 * 9.3e12
PERSEUS_INSIDE = 16e9  # PCIe 3.0 x16, each way
PERSEUS_MEMORY = 732e9
