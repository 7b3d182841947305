"""launch.sh: two ranks on two hosts, reached by an ssh that is none.

Its client does not pass on signals, as the real one.
"""

import os
import subprocess
import time

import pytest
import runs
import test_deployment
from samples import write_config, write_records


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


@pytest.mark.slow
def test_sigterm_reaches_ranks_behind_ssh(job, tmp_path):
  """They save, and launch.sh ends with their status."""
  env, command = job
  process = subprocess.Popen(
    command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
  )
  try:
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + runs.HANG_SECONDS
    while not (metrics.exists() and len(runs.metrics(tmp_path / "run")) > 2):
      assert process.poll() is None, process.stderr.read()[-3000:]
      assert time.monotonic() < deadline
      time.sleep(0.1)
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
