"""Several Horovod ranks, as commands: the equivalence contract and failures."""

import json
import re

import numpy as np
import pytest
import runs
from conftest import NO_DROPOUT, write_config, write_packed, write_records

from data import records, tfrecord
from gradients import distributed


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
  """Config without dropout, 2 x 60 records, and one rank's 20 losses."""
  folder = tmp_path_factory.mktemp("data")
  for i in range(2):
    write_records(folder / f"data-{i}.tfrecord", 60, seed=i)
  config = write_config(folder / "config.json", **NO_DROPOUT)
  tiny = config, str(folder / "data-*.tfrecord")
  runs.pretrain(tiny, folder / "one", do_eval=True)
  return tiny, folder / "one"


@pytest.fixture(scope="module")
def packed_run(tmp_path_factory):
  """As plain_run, of packed records; and the global batch in examples."""
  folder = tmp_path_factory.mktemp("packed")
  pattern, global_batch = write_packed(folder)
  tiny = write_config(folder / "config.json", **NO_DROPOUT), pattern
  runs.pretrain(
    tiny, folder / "one", do_eval=True, global_batch_size=global_batch
  )
  return tiny, folder / "one", global_batch


@pytest.mark.parametrize(
  "ranks, micro_batch, flags",
  [
    pytest.param(2, 12, [], marks=pytest.mark.slow),
    pytest.param(
      *(3, 8, ["--xla=off", "--allreduce_groups=1"]), marks=pytest.mark.slow
    ),
    (2, 6, ["--xla=step", "--allreduce_groups=0"]),
  ],
  ids=str,
)
def test_ranks_and_micro_batches_equal_one_big_batch(
  packed_run, tmp_path, ranks, micro_batch, flags
):
  """2 x 12, 3 x 8, and 2 ranks x 2 micro-batches x 6, all 24 records.

  XLA and how gradients are grouped change nothing either: the one rank
  compiled nothing. The records hold one to three examples, so ranks have
  different numbers of them.
  """
  tiny, one, global_batch = packed_run
  process = runs.command(
    tiny,
    tmp_path / "run",
    ranks,
    [
      f"--global_batch_size={global_batch}",
      f"--train_batch_size={micro_batch}",
      "--do_eval",
      *flags,
    ],
  )
  assert process.returncode == 0, process.stderr[-3000:]
  assert len(runs.metrics(one)) == 20
  for key in ("loss", "masked_lm_loss", "next_sentence_loss", "grad_norm"):
    np.testing.assert_allclose(
      runs.metrics(tmp_path / "run", key),
      runs.metrics(one, key),
      rtol=1e-5 if "loss" in key else 1e-4,
      err_msg=key,
    )
  for key in ("examples", "padding", "masked_lm_accuracy", "skipped_updates"):
    np.testing.assert_allclose(
      runs.metrics(tmp_path / "run", key), runs.metrics(one, key), rtol=1e-6
    )
  # A rank alone has nobody to wait for.
  assert set(runs.metrics(one, "all_reduce_seconds")) == {0.0}
  assert min(runs.metrics(tmp_path / "run", "all_reduce_seconds")) > 0.0
  # Evaluation counts each example once, whatever the ranks.
  alone = runs.read_json(one, "eval_results.json")
  together = runs.read_json(tmp_path / "run", "eval_results.json")
  assert together["examples"] == alone["examples"] > 120
  for key, value in alone.items():
    np.testing.assert_allclose(together[key], value, rtol=1e-4, err_msg=key)


@pytest.mark.slow
def test_gradients_sent_as_float16_train_as_well(plain_run, tmp_path):
  tiny, one = plain_run
  flags = ["--global_batch_size=24", "--train_batch_size=12"]
  process = runs.command(
    tiny, tmp_path / "run", 2, [*flags, "--fp16_allreduce", "--xla=off"]
  )
  assert process.returncode == 0, process.stderr[-3000:]
  got, want = runs.metrics(tmp_path / "run", "loss"), runs.metrics(one, "loss")
  assert got != want
  np.testing.assert_allclose(got, want, rtol=2e-3)
  assert set(runs.metrics(tmp_path / "run", "loss_scale")) == {2.0**16}


@pytest.mark.slow
def test_per_rank_mode_divides_the_steps(tiny_run, tmp_path):
  process = runs.command(
    tiny_run, tmp_path / "run", 2, ["--train_batch_size=6"]
  )
  assert process.returncode == 0, process.stderr[-3000:]
  assert runs.metrics(tmp_path / "run", "examples") == [
    12 * k for k in range(1, 11)
  ]
  # Rank 0 alone prints: the plan is there once.
  assert process.stderr.count("10 updates (2 of warm-up)") == 1


@pytest.mark.slow
def test_two_ranks_stopped_by_a_signal_resume_bit_for_bit(tiny_run, tmp_path):
  """With dropout. horovodrun is asked to end: it passes it on to its ranks."""
  flags = ["--train_batch_size=6", "--global_batch_size=12"]
  flags += ["--num_train_steps=400"]
  whole, stopped = tmp_path / "whole", tmp_path / "stopped"
  process = runs.command(tiny_run, whole, 2, flags)
  assert process.returncode == 0, process.stderr[-3000:]
  process = runs.command(
    tiny_run, stopped, 2, flags, stop=lambda: len(runs.metrics(stopped)) > 20
  )
  assert process.returncode == 75
  assert "SIGTERM: saving after this update" in process.stderr
  lines = last_lines(process.stderr, 2)
  assert "the same command resumes there" in lines[0], process.stderr
  seen = len(runs.metrics(stopped))
  assert 20 < seen < 400
  assert runs.weights(stopped)["global_step"] == seen
  process = runs.command(tiny_run, stopped, 2, flags)
  assert process.returncode == 0, process.stderr[-3000:]
  assert f"resumed {stopped}/model.ckpt-{seen}" in process.stderr
  assert runs.metrics(stopped) == runs.metrics(whole)
  want = runs.weights(whole)
  for name, value in runs.weights(stopped).items():
    np.testing.assert_array_equal(value, want[name], err_msg=name)


@pytest.mark.parametrize(
  "allreduce",
  [
    {"zero": 1},
    pytest.param({"powersgd_rank": 2}, marks=pytest.mark.slow),
    pytest.param({}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_resumed_on_other_numbers_of_ranks(plain_run, tmp_path, allreduce):
  """1, 2 and 3 ranks in turn: the batches of one rank, in its order.

  Also with what each rank has of its own: PowerSGD's errors, ZeRO's moments.
  """
  tiny, _ = plain_run
  settings = dict(
    lr_schedule="constant",
    global_batch_size=20,
    allreduce=distributed.AllreduceConfig(**allreduce),
  )
  runs.pretrain(tiny, tmp_path / "one", **settings)
  runs.pretrain(tiny, tmp_path / "run", num_train_steps=7, **settings)
  flags = ["--lr_schedule=constant", "--global_batch_size=20", "--xla=off"]
  flags += [f"--{name}={value}" for name, value in allreduce.items()]
  for ranks, steps in ((2, 13), (3, 20)):  # 3 x 7 rows, one of them empty
    process = runs.command(
      tiny,
      tmp_path / "run",
      ranks,
      [*flags, "--train_batch_size=7", f"--num_train_steps={steps}"],
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert "resumed " in process.stderr
  assert runs.metrics(tmp_path / "run", "global_step") == list(range(1, 21))
  for key in ("examples", "padding", "learning_rate"):
    assert runs.metrics(tmp_path / "run", key) == pytest.approx(
      runs.metrics(tmp_path / "one", key), rel=1e-12
    )
  np.testing.assert_allclose(
    runs.metrics(tmp_path / "run"), runs.metrics(tmp_path / "one"), rtol=1e-5
  )


HANG = """
import os, sys, time
import run_pretraining
from training import signals, train_loop

signals.Watchdog.SECONDS = 10.0
update, updates = train_loop.run_update, []

def update_and_hang(*arguments):
  updates.append(1)
  if len(updates) == 9 and os.environ["HOROVOD_RANK"] == "1":
    time.sleep(1000)
  return update(*arguments)

train_loop.run_update = update_and_hang
run_pretraining.define_flags()
train_loop.run_main(run_pretraining.main)
"""


def test_a_rank_whose_program_stands_still_ends_all(tiny_run, tmp_path):
  """Its Horovod goes on answering, so the others would wait for ever."""
  script = tmp_path / "hang.py"
  script.write_text(HANG)
  arguments = runs.arguments(tiny_run, tmp_path / "run")[1:]
  process = runs.launch(
    [str(script), *arguments, "--train_batch_size=6", "--xla=off"],
    ranks=2,
  )
  assert process.returncode not in (0, None)
  told = process.stderr
  assert "hang.py: error: no progress for" in told
  assert "This one is in update_and_hang" in told or (
    last_lines(told, 2).get(1) == "Terminated"  # the other was first
  )
  assert len(runs.metrics(tmp_path / "run")) == 8


SLOW_DISK = """
import time
import run_pretraining
from training import checkpoint_files, signals, train_loop

signals.Watchdog.SECONDS = 8.0
signals.Watchdog.LONGEST = 1.0
write = checkpoint_files._Writer.__call__

def slowly(*arguments):
  time.sleep(20)
  write(*arguments)

checkpoint_files._Writer.__call__ = slowly
run_pretraining.define_flags()
train_loop.run_main(run_pretraining.main)
"""


@pytest.mark.slow
def test_a_disk_slower_than_the_watchdog_is_waited_for(tiny_run, tmp_path):
  """Also with ZeRO, whose ranks make a checkpoint together."""
  script = tmp_path / "slow.py"
  script.write_text(SLOW_DISK)
  arguments = runs.arguments(tiny_run, tmp_path / "run")[1:]
  flags = ["--train_batch_size=6", "--save_checkpoints_steps=8", "--zero=1"]
  process = runs.launch([str(script), *arguments, *flags, "--xla=off"], ranks=2)
  assert process.returncode == 0, process.stderr[-3000:]
  assert runs.weights(tmp_path / "run")["global_step"] == 10
  saved = sorted(p.stem for p in (tmp_path / "run").glob("model.ckpt-*.json"))
  assert saved == ["model.ckpt-10", "model.ckpt-8"]


def last_lines(stderr, ranks):
  """The last line of each rank, without horovodrun's prefix."""
  found = {}
  for line in stderr.splitlines():
    for rank in range(ranks):
      prefix = f"[{rank}]<stderr>:"
      if line.startswith(prefix):
        found[rank] = line.removeprefix(prefix)
  return found


@pytest.mark.slow
def test_a_wrong_setting_ends_all_ranks_with_one_message(tiny_run, tmp_path):
  process = runs.command(
    tiny_run, tmp_path / "run", 2, ["--global_batch_size=1"]
  )
  assert process.returncode != 0
  # horovodrun ends the slower rank, perhaps before it says the same.
  said = [
    line
    for line in last_lines(process.stderr, 2).values()
    if line != "Terminated"
  ]
  assert said, process.stderr
  for line in said:
    assert "error: a global batch of 1 records leaves some of 2 ranks" in line


@pytest.mark.slow
def test_a_damaged_record_ends_all_ranks(tmp_path):
  """One rank reads it; the other must not wait for it for ever."""
  path = write_records(tmp_path / "data.tfrecord", 40)
  offsets = np.load(path + ".index")
  data = bytearray((tmp_path / "data.tfrecord").read_bytes())
  data[offsets[17] + 30] ^= 255
  (tmp_path / "data.tfrecord").write_bytes(data)
  with pytest.raises(records.DataError):
    tfrecord.RecordSet([path]).read(17)
  process = runs.command(
    (write_config(tmp_path / "c.json"), path),
    tmp_path / "run",
    2,
    ["--global_batch_size=8", "--train_batch_size=4"],
  )
  assert process.returncode != 0
  assert any(
    path in line and "record 17" in line
    for line in last_lines(process.stderr, 2).values()
  ), process.stderr[-3000:]


def test_ranks_that_disagree_are_named(tmp_path):
  """As on hosts that were given different files."""
  script = tmp_path / "disagree.py"
  script.write_text(
    "from gradients import distributed\n"
    "from training import train_loop\n"
    "def main(_):\n"
    "  comm = distributed.init()\n"
    "  comm.check_equal('the seed', '1')\n"
    "  comm.check_equal('the data', f'{10 + comm.rank} records')\n"
    "train_loop.run_main(main)\n"
  )
  process = runs.launch([str(script)], ranks=2)
  assert process.returncode != 0
  messages = last_lines(process.stderr, 2)
  assert any(
    "the data of rank [1] differs" in line and "records" in line
    for line in messages.values()
  ), process.stderr[-3000:]


def test_a_rank_that_dies_takes_the_others_with_it(tmp_path):
  """Rank 1 is killed while the other waits in a collective."""
  script = tmp_path / "die.py"
  script.write_text(
    "import os, sys\n"
    "from gradients import distributed\n"
    "from training import train_loop\n"
    "import numpy as np\n"
    "def main(_):\n"
    "  comm = distributed.init()\n"
    "  if comm.rank == 1: os.kill(os.getpid(), 9)\n"
    "  comm.gather(np.zeros(1))\n"
    "train_loop.run_main(main)\n"
  )
  process = runs.launch([str(script)], ranks=2)
  assert process.returncode != 0
  last = process.stderr.strip().splitlines()[-1]
  assert last.startswith("horovodrun: error: processes ended in this order: ")
  assert "1 with status 137 (killed by SIGKILL)" in last
  assert "Traceback" not in process.stderr


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_an_error_of_the_others(tmp_path):
  script = tmp_path / "late.py"
  script.write_text(
    "import os, time\n"
    "from gradients import distributed\n"
    "from training import train_loop\n"
    "def main(_):\n"
    "  if os.environ['HOROVOD_RANK'] == '1': time.sleep(100)\n"
    "  distributed.init()\n"
    "train_loop.run_main(main)\n"
  )
  process = runs.launch(
    [str(script)],
    launcher=["-np", "2", "--gloo-timeout-seconds", "5"],
  )
  assert process.returncode == 1
  assert last_lines(process.stderr, 2)[0] == (
    "late.py: error: this rank is not in the run: the ranks did not find each "
    "other, or its host was taken out. Horovod's line above says which"
  )


OVERFLOW = """
import dataclasses, json, time
import optimization
import mixed_precision
from gradients import distributed, exchange
from training import reporting, train_loop
from common.tensorflow_v1 import tf

def main(_):
  comm = distributed.init()
  tf.enable_resource_variables()
  x = tf.placeholder(tf.float32, [])
  w = tf.get_variable("w", initializer=tf.constant([1.0, 2.0]))
  half = tf.cast(w, tf.float16) * tf.cast(x, tf.float16)
  scale = mixed_precision.LossScaleConfig(initial_loss_scale=2.0**10).make(
    uses_fp16=True
  )
  loss = tf.reduce_sum(tf.cast(half, tf.float32)) * scale.value
  ops = optimization.build_train_ops(
    tf.gradients(loss, [w]),
    {"n": tf.reduce_sum(w)},
    optimization.OptimizerConfig().make(tf.constant(0.1)),
    exchange.make(distributed.AllreduceConfig(), comm, scale.value),
    MICRO_BATCHES,
    scale,
  )
  fetches = ops.fetches()
  with tf.Session() as session:
    session.run(
      [tf.global_variables_initializer(), tf.local_variables_initializer()]
    )
    for update in range(4):
      if comm.rank == 1 and update == 3:
        time.sleep(1.0)
      # Times the scale 2^10 this is beyond float16's 65,504, on rank 1 only.
      bad = comm.rank == 1 and update == 1
      feed = {x: 100.0 if bad and MICRO_BATCHES == 1 else 1.0}
      for _ in range(MICRO_BATCHES - 1):
        session.run(ops.accumulate, {x: 100.0 if bad else 1.0})
      got = session.run(fetches, feed)
      reporting.tell_trouble(update + 1, got, ops.variables)
      report = [
        comm.rank, update, bool(got["skipped"]), float(got["loss_scale"]),
        int(got["dropped_micro_batches"]), session.run(w).tolist(),
      ]
      print("REPORT" + json.dumps(report), flush=True)
      print(f"WAITED{comm.rank} {got['all_reduce_seconds']}", flush=True)

train_loop.run_main(main)
"""


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.slow
def test_an_overflow_on_one_rank_is_one_decision(tmp_path, micro_batches):
  """Both skip (or drop the one micro-batch), both halve, both go on."""
  script = tmp_path / "overflow.py"
  script.write_text(OVERFLOW.replace("MICRO_BATCHES", str(micro_batches)))
  process = runs.launch([str(script)], ranks=2)
  assert process.returncode == 0, process.stderr[-3000:]
  reports = {0: [], 1: []}
  for line in process.stdout.splitlines():
    if "REPORT" in line:
      rank, *report = json.loads(line.partition("REPORT")[2])
      reports[rank].append(report)
  assert reports[0] == reports[1]
  # Rank 0 waits for the other, which is late to the last update.
  waited = [
    [float(s) for s in re.findall(rf"WAITED{rank} (\S+)", process.stdout)]
    for rank in (0, 1)
  ]
  assert len(waited[0]) == len(waited[1]) == 4
  assert 0.7 < waited[0][3] < 20 and waited[0][3] - waited[1][3] > 0.5
  skipped, scales, dropped, weights = zip(
    *[report[1:] for report in reports[0]], strict=True
  )
  assert scales == (1024.0, 1024.0, 512.0, 512.0)
  if micro_batches == 1:
    assert skipped == (False, True, False, False)
    assert weights[0] == weights[1] != weights[2]
    assert (
      "update 2: skipped, the gradient of w is not finite" in process.stderr
    )
  else:
    assert skipped == (False, False, False, False)
    assert dropped == (0, 1, 0, 0)
    assert weights[0] != weights[1] != weights[2]
    assert "update 2: 1 micro-batches dropped, the gradient of w" in (
      process.stderr
    )


THREADS = """
import os
from gradients import distributed
from training import train_loop
from common.tensorflow_v1 import tf

def main(_):
  rank = int(os.environ["HOROVOD_RANK"])
  comm = distributed.init(num_threads=1 + 40 * rank)
  comm.check_equal("the settings", "")
  with tf.Session(config=distributed.session_config(comm)) as session:
    session.run(tf.random.normal([100, 100]))
  found = comm.gather([len(os.listdir("/proc/self/task"))])[:, 0]
  if comm.is_root:
    print(f"THREADS {found[1] - found[0]}", flush=True)

train_loop.run_main(main)
"""


def test_a_rank_has_the_threads_that_it_was_given(tmp_path):
  """Though the ranks' first session is a collective's, not the training's.

  Whatever else has threads has as many on both ranks.
  """
  script = tmp_path / "threads.py"
  script.write_text(THREADS)
  process = runs.launch([str(script)], ranks=2)
  assert process.returncode == 0, process.stderr[-3000:]
  assert int(process.stdout.split("THREADS")[1]) == 40
