"""The grammar exam on two ranks: one rank's results, and errors of one."""

import json
import random

import pytest
import runs
import trained

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


def evaluate(folder, output, ranks, broken=None):
  """The command; rank `broken` gets pairs that are none."""
  script = f"""
import os, runpy, sys
rank = os.environ.get("HOROVOD_RANK", "0")
pairs = "{folder}/" + ("none.jsonl" if rank == "{broken}" else "p.jsonl")
sys.argv = ["{runs.ROOT}/tools/evaluate_grammar.py", "{folder}/model",
            "--output={output}", f"--pairs={{pairs}}"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
  return runs.launch(["-c", script], ranks, timeout=SECONDS)


def test_two_ranks_give_the_results_of_one(folder, tmp_path):
  printed = []
  for ranks in (1, 2):
    done = evaluate(folder, tmp_path / f"{ranks}.json", ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    printed += [line for line in lines if "mean of 1 paradigms" in line]
  one, two = (runs.read_json(tmp_path, f"{n}.json") for n in (1, 2))
  # So many random pairs that a score in another's place would change some.
  assert one == two and one["pairs"] == 301 and one["ties"] < 20
  assert 0 < one["accuracy"] < 1
  assert len(printed) == 2  # rank 0 alone prints


@pytest.mark.parametrize("broken", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_of_one_rank_ends_the_other(folder, tmp_path, broken):
  done = evaluate(folder, tmp_path / "none.json", 2, broken)
  assert done.returncode != 0
  assert "none.jsonl: no such file" in done.stderr
  assert not (tmp_path / "none.json").exists()
