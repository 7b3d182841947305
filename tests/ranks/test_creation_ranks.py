"""Records by horovodrun: the bytes of one process."""

import pytest
import runs
from samples import contents


def make(folder, texts, letters, ranks, *more):
  command = ["create_pretraining_data.py", f"--input_file={texts}"]
  command += [f"--vocab_file={letters}", "--max_predictions_per_seq=6"]
  command += [f"--output_file={folder}/train.tfrecord", "--num_shards=5"]
  return runs.launch([*command, "--max_seq_length=32", *more], ranks)


@pytest.mark.slow
def test_ranks_make_the_same_bytes(tmp_path, texts, letters):
  for ranks in (1, 3):
    process = make(tmp_path / str(ranks), texts, letters, ranks)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("documents        60") == 1
  assert contents(tmp_path / "1") == contents(tmp_path / "3")
  # All the same after a failure, which ends all ranks with its own words.
  process = make(tmp_path / "bad", texts, letters, 3, "--masked_lm_prob=2")
  assert process.returncode != 0
  assert "--masked_lm_prob=2.0: must be in (0, 1)" in process.stderr
