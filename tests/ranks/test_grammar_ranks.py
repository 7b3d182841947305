"""The grammar exam on two ranks: one rank's results, and errors of one."""

import json
import random

import pytest
import runs
import trained

from gradients.distributed import Comm
from tools import evaluate_grammar

SECONDS = 120  # for what hangs


@pytest.fixture(scope="module")
def folder(tmp_path_factory, letters):
  """A model of random weights, and 301 pairs of 2 to 20 words."""
  folder = tmp_path_factory.mktemp("models")
  trained.write_model(folder / "model", "pretraining", letters)
  rng, words = random.Random(1), ["the", "cat", "is", "so", "a", "no", "it"]
  sentence = lambda n: " ".join(rng.choices(words, k=n))
  pairs = [(sentence(2 + n % 19), sentence(2 + n % 17)) for n in range(300)]
  lines = [
    json.dumps({"sentence_bad": bad, "sentence_good": good})
    for bad, good in [*pairs, ("x", "x")]
  ]
  (folder / "p.jsonl").write_text("\n".join(lines))
  return folder


def on_two_ranks(folder, output, broken=None):
  """The command; rank `broken` gets pairs that are none."""
  script = f"""
import os, runpy, sys
pairs = "{folder}/p.jsonl"
if os.environ["HOROVOD_RANK"] == "{broken}":
  pairs = "{folder}/none.jsonl"
sys.argv = ["{runs.ROOT}/tools/evaluate_grammar.py", "{folder}/model",
            "--output={output}", f"--pairs={{pairs}}"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
  return runs.launch(["-c", script], 2, timeout=SECONDS)


def test_two_ranks_give_the_results_of_one(folder, tmp_path):
  done = on_two_ranks(folder, tmp_path / "2.json")
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.count("mean of 1 paradigms") == 1  # rank 0 alone prints
  alone = evaluate_grammar.Settings(
    pairs=f"{folder}/p.jsonl", output=f"{tmp_path}/1.json"
  )
  evaluate_grammar.evaluate(alone, f"{folder}/model", Comm())
  one, two = (runs.read_json(tmp_path, f"{n}.json") for n in (1, 2))
  # So many random pairs that a score in another's place would change some.
  assert one == two and one["pairs"] == 301 and one["ties"] < 20
  assert 0 < one["accuracy"] < 1


@pytest.mark.parametrize("broken", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_of_one_rank_ends_the_other(folder, tmp_path, broken):
  done = on_two_ranks(folder, tmp_path / "none.json", broken)
  assert done.returncode != 0
  assert "none.jsonl: no such file" in done.stderr
  assert not (tmp_path / "none.json").exists()
