"""Two ranks on two hosts: by launch.sh, and by slurm.sh with srun.

ssh and srun are stand-ins. They do with signals what the real ones do: ssh does
not pass them on, and srun kills its tasks.
"""

import os
import subprocess
import time

import numpy as np
import pytest
import runs
import test_deployment
from samples import NO_DROPOUT, write_config, write_records


@pytest.fixture
def job(tmp_path):
  """A checkout and how to start launch.sh there: (environment, command)."""
  folder = tmp_path / "checkout"
  env = test_deployment.checkout(folder)
  write_records(tmp_path / "data-0.tfrecord", 48)
  tiny = write_config(tmp_path / "config.json"), f"{tmp_path}/data-*.tfrecord"
  flags = runs.arguments(tiny, tmp_path / "run")[1:]
  # Not this machine's own addresses, so horovodrun uses ssh.
  hosts = "127.0.0.2:1,127.0.0.3:1"
  command = [f"{folder}/docker/launch.sh", hosts, *flags, "--xla=off"]
  return env, [*command, "--train_batch_size=12", "--num_train_steps=100000"]


def ranks_left(env):
  """What runs of `job` yet."""
  found = []
  for entry in os.scandir("/proc"):
    try:
      with open(f"{entry.path}/environ", "rb") as f:
        values = f.read().split(b"\0")
    except OSError:
      continue
    path = f"PATH={env['PATH']}".encode()
    if path in values and any(v.startswith(b"HOROVOD_RANK=") for v in values):
      found.append(entry.name)
  return found


def wait_for_updates(process, folder):
  """Returns when the run has reported three updates."""
  deadline = time.monotonic() + runs.HANG_SECONDS
  metrics = folder / "metrics.jsonl"
  while not (metrics.exists() and len(runs.metrics(folder)) > 2):
    assert process.poll() is None, process.stderr.read()[-3000:]
    assert time.monotonic() < deadline
    time.sleep(0.1)


@pytest.mark.slow
def test_sigterm_reaches_ranks_behind_ssh(job, tmp_path):
  """They save, and launch.sh ends with their status."""
  env, command = job
  process = subprocess.Popen(
    command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
  )
  try:
    wait_for_updates(process, tmp_path / "run")
    assert len(ranks_left(env)) == 2
    process.terminate()
    _, told = process.communicate(timeout=runs.HANG_SECONDS)
  finally:
    for rank in ranks_left(env):
      os.kill(int(rank), 9)
  assert process.returncode == 75, told[-3000:]
  assert "asked 1 ranks to save and end" in told
  assert "ranks left over" not in told
  updates = runs.metrics(tmp_path / "run", "global_step")[-1]
  assert (tmp_path / "run" / f"model.ckpt-{updates}.index").exists()


UPDATES = 150  # more than there are in the time until the signal comes


@pytest.mark.slow
def test_a_job_of_srun_saves_returns_to_the_queue_and_resumes(tmp_path):
  """Its two ranks train as one rank does, no update is lost or repeated."""
  _, env = test_deployment.srun_job(tmp_path)
  folder = tmp_path / "checkout"
  test_deployment.write_script(
    folder / "bin/scontrol",
    '[ "$1" != show ] || { echo 127.0.0.2; echo 127.0.0.3; }',
    f'[ "$1" != requeue ] || echo "$*" >{tmp_path}/requeued',
  )
  test_deployment.write_script(folder / "bin/squeue", "echo RUNNING")
  env |= {
    "LAUNCH": "srun",
    "RANKS_PER_HOST": "1",
    "SLURM_SUBMIT_DIR": str(folder),
    "SLURM_JOB_NODELIST": "all",
  }
  write_records(tmp_path / "data-0.tfrecord", 48)
  config = write_config(tmp_path / "config.json", **NO_DROPOUT)
  tiny = config, f"{tmp_path}/data-*.tfrecord"
  flags = [f"--num_train_steps={UPDATES}", "--xla=off"]
  batch = ["--train_batch_size=12", "--global_batch_size=24"]
  words = [*runs.arguments(tiny, tmp_path / "run")[1:], *flags, *batch]

  def start():
    return subprocess.Popen(
      [folder / "docker/slurm.sh", *words],
      env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

  job = start()
  wait_for_updates(job, tmp_path / "run")
  job.terminate()
  said, told = job.communicate(timeout=runs.HANG_SECONDS)
  assert "status 75, back into the queue" in said, told[-3000:]
  assert job.returncode == 0
  assert (tmp_path / "requeued").read_text() == "requeue 7\n"
  stopped = runs.metrics(tmp_path / "run", "global_step")[-1]
  assert (tmp_path / "run" / f"model.ckpt-{stopped}.index").exists()

  job = start()
  _, told = job.communicate(timeout=runs.HANG_SECONDS)
  assert job.returncode == 0, told[-3000:]
  steps = runs.metrics(tmp_path / "run", "global_step")
  assert steps == [*range(1, UPDATES + 1)] and stopped < UPDATES
  runs.pretrain(tiny, tmp_path / "one", num_train_steps=UPDATES)
  both = (runs.metrics(tmp_path / name)[:20] for name in ("run", "one"))
  np.testing.assert_allclose(*both, rtol=1e-4)
