"""Several Horovod ranks as commands: what ends them, and more than two.

lockstep/ has the equivalence of two ranks and one.
"""

import os
import textwrap

import numpy as np
import pytest
import runs
from samples import write_config, write_records

from records import data_set, tfrecord


@pytest.mark.slow
def test_two_ranks_stopped_by_a_signal_resume_bit_for_bit(tiny_run, tmp_path):
  """With dropout. horovodrun is asked to end: it passes it on to its ranks."""
  flags = ["--train_batch_size=6", "--global_batch_size=12"]
  flags += ["--num_train_steps=400"]
  whole, stopped = tmp_path / "whole", tmp_path / "stopped"
  process = runs.complete(tiny_run, whole, 2, flags)
  process = runs.command(
    tiny_run, stopped, 2, flags, stop=lambda: len(runs.metrics(stopped)) > 20
  )
  assert process.returncode == 75
  assert "SIGTERM: saving after this micro-batch" in process.stderr
  lines = last_lines(process.stderr, 2)
  assert "the same command resumes there" in lines[0], process.stderr
  assert process.stderr.count("400 updates (") == 1  # rank 0 alone prints
  seen = len(runs.metrics(stopped))
  assert 20 < seen < 400
  assert runs.weights(stopped)["global_step"] == seen
  process = runs.complete(tiny_run, stopped, 2, flags)
  assert f"resumed {stopped}/model.ckpt-{seen}" in process.stderr
  assert runs.metrics(stopped) == runs.metrics(whole)
  runs.assert_equal(runs.weights(stopped), runs.weights(whole))


def launch_patched(patch, tiny_run, folder, *flags):
  """The process of two ranks that train in folder/run after a patch."""
  script = runs.patched(folder / "patched.py", patch)
  arguments = runs.arguments(tiny_run, folder / "run")[1:]
  always = ["--train_batch_size=6", "--xla=off"]
  return runs.launch([script, *arguments, *always, *flags], ranks=2)


CHOOSES = f"""
import sys
sys.path.append({os.path.dirname(runs.__file__)!r})
import runs
from checkpoints import checkpoint_files

hold = checkpoint_files.hold
chosen = os.path.abspath(__file__) + ".chosen"

def hold_late(prefix):
  while os.environ["HOROVOD_RANK"] == "1" and not os.path.exists(chosen):
    time.sleep(0.1)
  is_there, folder = hold(prefix), os.path.dirname(prefix)
  files = checkpoint_files.CheckpointFiles(folder, keep=1)
  files.write(30, runs.weights(folder))
  files.wait()
  open(chosen, "w").close()
  return is_there

checkpoint_files.hold = hold_late
"""


@pytest.mark.slow
def test_rank_0_chooses_the_checkpoint_of_a_run_that_goes_on(
  tiny_run, tmp_path
):
  """Update 30 of it is there, and 20 is not, before rank 1 could choose."""
  first, run = tmp_path / "first", tmp_path / "run"
  runs.trained(tiny_run, first)
  process = launch_patched(
    CHOOSES, tiny_run, tmp_path, f"--init_checkpoint={first}"
  )
  assert process.returncode == 0, process.stderr[-3000:]
  assert f"initialised from {first}/model.ckpt-20\n" in process.stderr
  started = runs.read_json(run, "run.json")["runs"][0]["flags"]
  assert started["init_checkpoint"] == f"{first}/model.ckpt-20"


BY_THE_CLOCK = """
import pathlib
from checkpoints import checkpointing

saves = pathlib.Path(__file__ + "." + os.environ["HOROVOD_RANK"])
save, update = checkpointing.Checkpointer.save, train_loop.run_update

def save_and_tell(self, session, step):
  with saves.open("a") as f:
    print(step, file=f)
  save(self, session, step)

def update_slowly(run, number, *arguments):
  if number == 31:
    os._exit(1)
  time.sleep(0.1)
  return update(run, number, *arguments)

checkpointing.Checkpointer.save = save_and_tell
train_loop.run_update = update_slowly
"""


@pytest.mark.slow
def test_ranks_save_by_the_clock_together_and_resume_from_there(
  tiny_run, tmp_path
):
  """Both end without a word in update 31; --save_every_minutes is 1.2 s."""
  flags = ["--train_batch_size=6", "--global_batch_size=12", "--xla=off"]
  flags += ["--num_train_steps=40", "--save_checkpoints_steps=0"]
  whole, run = tmp_path / "whole", tmp_path / "run"
  process = runs.complete(tiny_run, whole, 2, flags)
  flags += ["--save_every_minutes=0.02"]
  process = launch_patched(BY_THE_CLOCK, tiny_run, tmp_path, *flags)
  assert process.returncode == 1, process.stderr[-3000:]
  first, second = (
    [
      int(step)
      for step in (tmp_path / f"patched.py.{rank}").read_text().split()
    ]
    for rank in range(2)
  )
  assert first == second and len(first) >= 2 and first[-1] <= 30
  process = runs.complete(tiny_run, run, 2, flags)
  saved = (f"resumed {run}/model.ckpt-{step}\n" for step in first)
  assert any(line in process.stderr for line in saved), process.stderr
  assert runs.metrics(run) == runs.metrics(whole)
  runs.assert_equal(runs.weights(run), runs.weights(whole))


HANG = """
signals.Watchdog.SECONDS = 10.0
update, updates = train_loop.run_update, []

def update_and_hang(*arguments):
  updates.append(1)
  if len(updates) == 9 and os.environ["HOROVOD_RANK"] == "1":
    time.sleep(1000)
  return update(*arguments)

train_loop.run_update = update_and_hang
"""


def test_a_rank_whose_program_stands_still_ends_all(tiny_run, tmp_path):
  """Its Horovod goes on answering, so the others would wait for ever."""
  process = launch_patched(HANG, tiny_run, tmp_path)
  assert process.returncode not in (0, None)
  told = process.stderr
  assert "patched.py: error: no progress for" in told
  assert "This one is in update_and_hang" in told or (
    last_lines(told, 2).get(1) == "Terminated"  # the other was first
  )
  assert len(runs.metrics(tmp_path / "run")) == 8


SLOW_DISK = """
from checkpoints import checkpoint_files

signals.Watchdog.SECONDS = 8.0
signals.Watchdog.LONGEST = 1.0
write = checkpoint_files._Writer.__call__

def slowly(*arguments):
  time.sleep(20)
  write(*arguments)

checkpoint_files._Writer.__call__ = slowly
"""


@pytest.mark.slow
def test_a_disk_slower_than_the_watchdog_is_waited_for(tiny_run, tmp_path):
  """Also with ZeRO, whose ranks make a checkpoint together."""
  process = launch_patched(
    SLOW_DISK, tiny_run, tmp_path, "--save_checkpoints_steps=8", "--zero=1"
  )
  assert process.returncode == 0, process.stderr[-3000:]
  assert runs.weights(tmp_path / "run")["global_step"] == 10
  saved = sorted(p.stem for p in (tmp_path / "run").glob("model.ckpt-*.json"))
  assert saved == ["model.ckpt-10", "model.ckpt-8"]


def script_of_ranks(path, body):
  """Writes a script of which each rank runs `body`; returns its path."""
  path.write_text(
    "import os, time\n"
    "import numpy as np\n"
    "from common.tensorflow_v1 import tf\n"
    "from gradients import distributed\n"
    "from training import train_loop\n"
    "def main(_):\n"
    "  rank = int(os.environ['HOROVOD_RANK'])\n"
    f"{textwrap.indent(body, '  ')}\n"
    "train_loop.run_main(main)\n"
  )
  return str(path)


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
  flags = ["--global_batch_size=1"]
  process = runs.command(tiny_run, tmp_path / "run", 2, flags)
  assert process.returncode != 0
  # horovodrun ends the slower rank, perhaps before it says the same.
  said = {*last_lines(process.stderr, 2).values()} - {"Terminated"}
  assert said, process.stderr
  for line in said:
    assert "error: a global batch of 1 records leaves some of 2 ranks" in line


@pytest.mark.slow
def test_a_damaged_record_ends_all_ranks(tmp_path):
  """One rank reads it; the other must not wait for it for ever."""
  path = write_records(tmp_path / "records.tfrecord", 40)
  offsets = np.load(path + ".index")
  data = bytearray((tmp_path / "records.tfrecord").read_bytes())
  data[offsets[17] + 30] ^= 255
  (tmp_path / "records.tfrecord").write_bytes(data)
  with pytest.raises(data_set.DataError):
    tfrecord.RecordSet([path]).read(17)
  tiny = write_config(tmp_path / "c.json"), path
  flags = ["--global_batch_size=8", "--train_batch_size=4"]
  process = runs.command(tiny, tmp_path / "run", 2, flags)
  assert process.returncode != 0
  last = last_lines(process.stderr, 2).values()
  assert any(path in line and "record 17" in line for line in last), last


def test_a_rank_that_dies_takes_the_others_with_it(tmp_path):
  """Rank 1 is killed while the other waits in a collective."""
  script = script_of_ranks(
    tmp_path / "die.py",
    "comm = distributed.init()\n"
    "if rank == 1: os.kill(os.getpid(), 9)\n"
    "comm.gather(np.zeros(1))\n",
  )
  process = runs.launch([script], ranks=2)
  assert process.returncode != 0
  last = process.stderr.strip().splitlines()[-1]
  assert last.startswith("horovodrun: error: processes ended in this order: ")
  assert "1 with status 137 (killed by SIGKILL)" in last
  assert "Traceback" not in process.stderr


@pytest.mark.slow
def test_ranks_that_have_not_begun_stop_with_the_same_status(tmp_path):
  """Both get horovodrun's signal while they build, say, their graphs."""
  ready = tmp_path / "ready"
  script = script_of_ranks(
    tmp_path / "early.py",
    "distributed.init().gather(np.zeros(1))\n"
    f"print('ready', file=open({str(ready)!r}, 'a'))\n"
    "time.sleep(600)\n",
  )
  both = lambda: ready.exists() and ready.read_text().count("ready") == 2
  process = runs.launch([script], ranks=2, stop=both)
  assert process.returncode == 75
  assert process.stderr.count("SIGTERM: stopped\n") == 2
  assert "Traceback" not in process.stderr
  said = "horovodrun: stopped as asked: the same command completes it\n"
  assert process.stderr.endswith("\n" + said)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_an_error_of_the_others(tmp_path):
  script = script_of_ranks(
    tmp_path / "late.py", "if rank == 1: time.sleep(100)\ndistributed.init()\n"
  )
  launcher = ["-np", "2", "--gloo-timeout-seconds", "5"]
  process = runs.launch([script], launcher=launcher)
  assert process.returncode == 1
  assert last_lines(process.stderr, 2)[0] == (
    "late.py: error: this rank is not in the run: the ranks did not find each "
    "other, or its host was taken out. Horovod's line above says which"
  )


THREADS = """
comm = distributed.init(num_threads=1 + 40 * rank)
comm.check_equal("the settings", "")
with tf.Session(config=distributed.session_config(comm)) as session:
  session.run(tf.random.normal([100, 100]))
found = comm.gather([len(os.listdir("/proc/self/task"))])[:, 0]
if comm.is_root:
  print(f"THREADS {found[1] - found[0]}", flush=True)
"""


def test_a_rank_has_the_threads_that_it_was_given(tmp_path):
  """Though the ranks' first session is a collective's, not the training's.

  Whatever else has threads has as many on both ranks.
  """
  script = script_of_ranks(tmp_path / "threads.py", THREADS)
  process = runs.launch([script], ranks=2)
  assert process.returncode == 0, process.stderr[-3000:]
  assert int(process.stdout.split("THREADS")[1]) == 40
