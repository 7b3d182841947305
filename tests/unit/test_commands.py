"""Each benchmark that README or docs/results.md names runs, in small."""

import json
import os
import pathlib
import re

import pytest
import runs

ROOT = pathlib.Path(runs.ROOT)
# FOLDER is the test's own. A command's last words are to be JSON lines.
SMALL = (
  "--bert_config_file=tiny --train_batch_size=2 --max_seq_length=16 "
  "--max_predictions_per_seq=3"
)
COMMANDS = [
  "benchmarks.faults.fault_schedules --schedules=1 --first=1",
  f"benchmarks.gpu.check --count {SMALL}",
  "benchmarks.gpu.day --tiny --only=device --output=FOLDER/day.jsonl",
  "benchmarks.measure checkpoint --tiny",
  "benchmarks.measure data --tiny",
  "benchmarks.measure input --tiny",
  "benchmarks.measure loss_curves --tiny",
  "benchmarks.measure memory_estimate --tiny",
  "benchmarks.network.allreduce --megabytes=1 --tensors=4 --repeats=1",
  "benchmarks.peers.compare --tiny --precisions=fp32 "
  "--transformers_python=TRANSFORMERS",
  f"benchmarks.step --rounds=1 --updates_per_round=1 {SMALL}",
  "benchmarks.time_to_quality --text=FOLDER --arms=FOLDER/arms.json "
  "--minutes=0.02 --seeds=1 --num_ranks=1 --output_dir=FOLDER/ttq",
]
# It needs root and an sshd, of which tests/ranks/test_hosts.py is.
ELSEWHERE = {"benchmarks.network.slow_network"}


def test_each_benchmark_that_a_page_names_is_run_here():
  named = set()
  for page in ("README.md", "docs/results.md"):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    named |= set(re.findall(r"python -m (benchmarks[\w.]+)", text))
    for path in re.findall(r"(benchmarks/[\w/]+)\.py", text):
      named.add(path.replace("/", "."))
  # It fetches 38 MB, and only makes text.
  run = {command.split()[0] for command in COMMANDS} | ELSEWHERE
  assert named - run == {"benchmarks.mixed_corpus"}


def write_recipe(folder: pathlib.Path) -> None:
  """A text of a few lines, its vocabulary, and an arm of time_to_quality."""
  page = (ROOT / "README.md").read_text(encoding="utf-8")
  (folder / "corpus").mkdir()
  for part in ("train", "heldout"):
    (folder / f"corpus/{part}.txt").write_text(page, encoding="utf-8")
  words = sorted({*re.findall(r"[a-z]+", page.lower())})
  special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
  (folder / "vocab.txt").write_text("\n".join([*special, *words]) + "\n")
  config = json.loads((ROOT / "configs/bert_tiny.json").read_text())
  del config["vocab_size"]
  records = {"objective": "mlm", "dynamic_masks": True, "max_seq_length": 32}
  arm = {"bert_config": config, "records": records}
  arm["train"] = {"train_batch_size": 4, "objective": "mlm", "xla": "off"}
  (folder / "arms.json").write_text(json.dumps({"small": arm}))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.split(" --")[0])
def test_a_benchmark_runs(command, tmp_path):
  if "TRANSFORMERS" in command:
    default = f"{ROOT}/.build/transformers/bin/python"
    python = os.environ.get("TRANSFORMERS_PYTHON", default)
    if not os.path.exists(python):
      pytest.skip(f"no transformers: {python} is missing")
    command = command.replace("TRANSFORMERS", python)
  if "time_to_quality" in command:
    write_recipe(tmp_path)
  words = command.replace("FOLDER", str(tmp_path)).split()
  process = runs.launch(["-m", *words])
  assert process.returncode == 0, process.stderr[-3000:]
  assert '{"' in process.stdout
