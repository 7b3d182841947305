"""A model sliced over ranks trains as the whole one does.

lockstep/ has two slices.
"""

import finetuning_runs
import numpy as np
import pytest
import runs
from samples import NO_DROPOUT, write_config, write_packed

from checkpoints import metrics

# A vocabulary that two slices cannot share evenly, heads that four can.
MODEL = dict(vocab_size=101, num_attention_heads=4)
LAMB = ["--optimizer=lamb", "--bias_correction"]


@pytest.fixture(scope="module")
def packed_run(tmp_path_factory):
  """Config with dropout, packed records, and the flags of a run."""
  folder = tmp_path_factory.mktemp("packed")
  pattern, global_batch = write_packed(folder)
  tiny = write_config(folder / "config.json", **MODEL), pattern
  return tiny, [f"--global_batch_size={global_batch}", "--do_eval"]


def train(run, folder, ranks, *flags):
  tiny, always = run
  return runs.complete(tiny, folder, ranks, [*always, *flags])


def assert_equal(got, want):
  """The same losses, gradients, evaluation and checkpoints."""
  runs.assert_alike(got, want)
  mine, whole = runs.weights(got), runs.weights(want)
  assert {n: v.shape for n, v in mine.items()} == {
    n: v.shape for n, v in whole.items()
  }


@pytest.mark.slow
@pytest.mark.parametrize(
  "ranks, whole_ranks, slices, flags",
  [
    (4, 2, 2, [*LAMB, "--zero=1", "--xla=off", "--train_batch_size=12"]),
    (4, 1, 4, [*LAMB, "--xla=off", "--recompute=layer,attention,gelu"]),
  ],
  ids=str,
)
def test_slices_equal_the_whole(
  packed_run, tmp_path, ranks, whole_ranks, slices, flags
):
  """With dropout, of which each slice draws its own heads' part."""
  train(packed_run, tmp_path / "whole", whole_ranks, *flags)
  train(
    packed_run, tmp_path / "run", ranks, f"--tensor_parallel={slices}", *flags
  )
  assert_equal(tmp_path / "run", tmp_path / "whole")
  for key in ("trust_ratio_min", "trust_ratio_median", "trust_ratio_max"):
    got, want = (runs.metrics(tmp_path / f, key) for f in ("run", "whole"))
    np.testing.assert_allclose(got[1:], want[1:], rtol=1e-3)


def without_dropout(packed_run, folder):
  """`packed_run` of another config."""
  (_, files), always = packed_run
  config = write_config(folder / "config.json", **MODEL, **NO_DROPOUT)
  return (config, files), always


@pytest.mark.slow
def test_two_by_two_equal_one_and_their_gradients(packed_run, tmp_path):
  """After one update a moment is a tenth of the gradient, of each variable."""
  run = without_dropout(packed_run, tmp_path)
  for folder, ranks, flags in (
    ("one", 1, []),
    ("four", 4, ["--tensor_parallel=2", "--zero=1"]),
  ):
    flags = [*flags, "--xla=off", "--num_train_steps=1", "--clip_norm=0"]
    train(run, tmp_path / folder, ranks, *flags, "--num_warmup_steps=0")
  one, four = (runs.weights(tmp_path / f) for f in ("one", "four"))
  moments = [name for name in one if name.endswith("/adam_m")]
  assert len(moments) == 46
  for name in moments:
    largest = np.abs(one[name]).max()
    # The gradient of the keys' biases is 0, but for rounding.
    tolerance = 1e-8 if "key/bias" in name else 1e-5 * largest
    np.testing.assert_allclose(
      four[name], one[name], rtol=1e-5, atol=tolerance, err_msg=name
    )
  assert runs.metrics(tmp_path / "four") == pytest.approx(
    runs.metrics(tmp_path / "one"), rel=1e-5
  )


@pytest.mark.slow
def test_two_by_two_compare_the_texts_of_one(tmp_path, letters):
  """An embedder's update in two passes, with ZeRO between two models."""
  finetuning_runs.maker("embed", tmp_path, letters, **MODEL, **NO_DROPOUT)
  command = [f"{runs.ROOT}/run_embedder.py", "--do_train", "--xla=off"]
  for name, value in dict(
    train_file=tmp_path / "a.jsonl", bert_config_file=tmp_path / "config.json",
    vocab_file=letters, max_seq_length=64, learning_rate=1e-3,
    global_batch_size=32, examples_per_record=2, log_every_steps=1,
  ).items():  # fmt: skip
    command.append(f"--{name}={value}")
  one, four = tmp_path / "one", tmp_path / "four"
  for folder, ranks, flags in (
    (one, 1, ["--train_batch_size=32"]),
    (four, 4, ["--train_batch_size=8", "--tensor_parallel=2", "--zero=1"]),
  ):
    flags = [*flags, f"--output_dir={folder}"]
    process = runs.launch([*command, *flags], ranks)
    assert process.returncode == 0, process.stderr[-3000:]
  plan = runs.read_json(four, "run.json")["runs"][0]["plan"]
  assert plan["ranks"] == 2 and plan["accumulation"] > 1
  for key, tolerance in (("loss", 1e-6), ("grad_norm", 1e-5)):
    pair = [runs.metrics(folder, key) for folder in (four, one)]
    np.testing.assert_allclose(*pair, rtol=tolerance, atol=1e-6, err_msg=key)
  weights = runs.weights(four)
  for name, value in runs.weights(one).items():
    np.testing.assert_allclose(weights[name], value, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_resumed_sliced_and_whole_in_turn(packed_run, tmp_path):
  """1 rank, 2 slices, 2 ranks of 2 slices; then its weights start a new run.

  The four share out their optimizer's state, too.
  """
  flags = ["--lr_schedule=constant", "--xla=off", "--train_batch_size=24"]
  plain, run = tmp_path / "one", without_dropout(packed_run, tmp_path)
  train(run, plain, 1, *flags)
  for ranks, slices, steps in ((1, 1, 6), (2, 2, 12), (4, 2, 16), (1, 1, 20)):
    more = [f"--tensor_parallel={slices}", f"--zero={int(ranks == 4)}"]
    more += [f"--num_train_steps={steps}"]
    process = train(run, tmp_path / "run", ranks, *flags, *more)
    assert steps == 6 or "resumed " in process.stderr
  assert runs.metrics(tmp_path / "run", "global_step") == list(range(1, 21))
  assert_equal(tmp_path / "run", plain)
  new = [*flags, "--num_train_steps=5"]
  new += [f"--init_checkpoint={plain}/model.ckpt-20"]
  train(run, tmp_path / "new", 1, *new)
  sliced = train(run, tmp_path / "sliced", 2, *new, "--tensor_parallel=2")
  assert "loaded: 46\n" in sliced.stderr
  assert_equal(tmp_path / "sliced", tmp_path / "new")


TROUBLE = """
signals.Watchdog.SECONDS = 10.0
feed, batches = signals.StopVote.feed, []

def feed_in_trouble(vote, *requests):
  if "evaluation" in vote._own.name:
    batches.append(1)
    if len(batches) == 12 and os.environ["HOROVOD_RANK"] == "1":
      TROUBLE
  return feed(vote, *requests)

signals.StopVote.feed = feed_in_trouble
"""


def in_trouble(packed_run, tmp_path, trouble):
  """Two slices of which one has trouble in its 12th evaluation batch."""
  tiny, always = packed_run
  patch = TROUBLE.replace("TROUBLE", trouble)
  script = runs.patched(tmp_path / "trouble.py", patch)
  arguments = runs.arguments(tiny, tmp_path / "run")[1:]
  flags = ["--tensor_parallel=2", "--xla=off", "--train_batch_size=24"]
  flags += ["--eval_every_steps=4", "--eval_batch_size=16"]
  return [script, *arguments, *always, *flags]


def test_a_signal_to_one_slice_ends_an_evaluation_on_all(packed_run, tmp_path):
  """The second of 8 batches each; the next start makes it after all."""
  signalled = "os.kill(os.getpid(), signal.SIGTERM)"
  command = in_trouble(packed_run, tmp_path, signalled)
  process = runs.launch(command, ranks=2)
  assert process.returncode == 75, process.stderr[-3000:]
  assert evaluated(tmp_path) == [0]
  assert runs.metrics(tmp_path / "run", "global_step") == [1, 2, 3, 4]
  train(packed_run, tmp_path / "run", 1, "--xla=off", "--eval_every_steps=4")
  assert evaluated(tmp_path) == [0, 4, 8, 12, 16, 20]


@pytest.mark.slow
def test_a_slice_that_hangs_in_an_evaluation_ends_all(packed_run, tmp_path):
  command = in_trouble(packed_run, tmp_path, "time.sleep(1000)")
  process = runs.launch(command, ranks=2)
  assert process.returncode not in (0, None)
  assert "trouble.py: error: no progress for" in process.stderr
  assert evaluated(tmp_path) == [0]


def evaluated(folder):
  path = f"{folder}/run/{metrics.EVAL_METRICS_FILE}"
  return [e["global_step"] for e in metrics.read_jsonl(path)]


@pytest.mark.slow
def test_an_overflow_in_one_slice_is_one_decision(packed_run, tmp_path):
  """float16 gradients overflow here and there until the scale has fallen."""
  flags = [
    *("--precision=fp16", "--initial_loss_scale=1e9", "--loss_scale_window=4"),
    *("--train_batch_size=12", "--xla=off"),
  ]
  train(packed_run, tmp_path / "run", 2, "--tensor_parallel=2", *flags)
  train(packed_run, tmp_path / "whole", 1, *flags)
  dropped = runs.metrics(tmp_path / "run", "dropped_micro_batches")
  assert 0 < sum(dropped) < 40
  assert dropped == runs.metrics(tmp_path / "whole", "dropped_micro_batches")
  scales = [runs.metrics(tmp_path / f, "loss_scale") for f in ("run", "whole")]
  assert scales[0] == scales[1] and scales[0][-1] < 1e9
