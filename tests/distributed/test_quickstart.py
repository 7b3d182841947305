"""`make pretrain`'s script: own text to the closing screen, on two ranks."""

import os

import runs

from training import training_hooks

SENTENCES = [
  f"The {noun} of the {place} {verb} every {time}."
  for noun in ("keeper", "dog", "teacher", "king")
  for place in ("lighthouse", "village", "old mill")
  for verb in ("sings", "sleeps", "walks to the sea")
  for time in ("morning", "winter")
]


def quickstart(folder, text, *flags):
  return runs.launch(
    [
      os.path.join(runs.ROOT, "quickstart.py"),
      f"--corpus={text}",
      f"--output_dir={folder}",
      "--num_train_steps=10",
      *flags,
    ]
  )


def test_own_text_to_a_curve_and_again(tmp_path):
  text = tmp_path / "text.txt"
  documents = ["\n".join(SENTENCES[i : i + 24]) for i in range(0, 72, 3)]
  text.write_text("\n\n".join(documents * 2))
  folder = tmp_path / "run"
  first = quickstart(folder, text)
  assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
  for expected in (
    "masked LM accuracy",
    "unigram entropy",
    "before and after 10 updates",
    "all in all",
    f"{folder}/pretrain/model.ckpt-10",
    "horovodrun -np 2",
  ):
    assert expected in first.stdout
  assert os.path.exists(folder / "curve.png")
  evaluations = training_hooks.read_jsonl(
    str(folder / "pretrain" / training_hooks.EVAL_METRICS_FILE)
  )
  assert [e["global_step"] for e in evaluations] == list(range(11))
  # The second call keeps text, vocabulary, records and weights.
  second = quickstart(folder, text)
  assert second.returncode == 0, second.stderr[-2000:]
  assert "nothing left to train" in second.stdout
  assert "== vocabulary" in first.stdout
  assert "== vocabulary" not in second.stdout


def test_another_text_in_the_same_folder_is_an_error(tmp_path):
  for name in ("a.txt", "b.txt"):
    (tmp_path / name).write_text("\n".join(SENTENCES))
  folder = tmp_path / "run"
  os.makedirs(folder)
  (folder / "source.json").write_text('{"corpus": "a.txt", "files": []}')
  process = quickstart(folder, tmp_path / "b.txt")
  assert process.returncode == 1
  assert "was made from other text" in process.stderr.splitlines()[-1]
