"""Runs over several hosts (benchmarks/network/hosts.py): ssh, a cable is cut.

Skipped where hosts cannot be made; the reason is in pytest's summary.
"""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import runs
import test_deployment
from samples import NO_DROPOUT, write_config, write_records

from benchmarks.network import hosts
from common import errors

pytestmark = pytest.mark.slow
PYTHON, HOROVODRUN = sys.executable, f"{runs.BIN}/horovodrun"


@pytest.fixture(scope="module")
def bed():
  """Two hosts and a wire of 1 Gbit/s."""
  try:
    made = hosts.Testbed(count=2, gbit=1.0)
  except errors.UserError as e:
    pytest.skip(f"NO RUN OVER SEVERAL HOSTS IS TESTED HERE: {e}")
  with made:
    yield made


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
  """(config without dropout, records)."""
  folder = tmp_path_factory.mktemp("data")
  write_records(folder / "data-0.tfrecord", 120)
  config = write_config(folder / "config.json", **NO_DROPOUT)
  return config, str(folder / "data-*.tfrecord")


def test_cables_have_the_rate_that_was_asked(bed):
  """Never more, and no less than a busy machine makes of low rates."""
  for asked in (0.05, 0.15):
    bed.set_rate(asked)
    measured = [bed.measure(seconds=0.8)]
    while max(measured) < 0.95 * asked and len(measured) < 8:
      measured.append(bed.measure(seconds=0.8))
    assert 0.8 * asked < max(measured) < 1.05 * asked, (asked, measured)
  bed.set_rate(1.0)


def test_two_hosts_train_as_one_rank_does(bed, plain, tmp_path):
  """By horovodrun's own ssh, found by its own search for an interface."""
  runs.pretrain(plain, tmp_path / "one")
  process = bed.run(
    [
      *(HOROVODRUN, *"-np 2 -H host1:1,host2:1 --disable-cache".split()),
      *(PYTHON, *runs.arguments(plain, tmp_path / "run"), "--xla=off"),
      *("--global_batch_size=24", "--train_batch_size=12"),
    ],
    timeout=runs.HANG_SECONDS,
  )
  assert process.returncode == 0, process.stderr[-3000:]
  for key in ("loss", "grad_norm"):
    got, want = (runs.metrics(tmp_path / name, key) for name in ("run", "one"))
    np.testing.assert_allclose(got, want, rtol=1e-4)
  assert min(runs.metrics(tmp_path / "run", "all_reduce_seconds")) > 0.0


UPDATES = 800  # more than there are in the time that a cut takes to be made


def test_a_host_that_is_cut_off_is_left_behind(bed, plain, tmp_path):
  """The elastic run goes on without it; on the host itself nothing is left."""
  test_deployment.checkout(tmp_path / "checkout")  # but not its ssh
  (tmp_path / "hosts").write_text("host1:1\nhost2:1\n")
  command = [f"{tmp_path}/checkout/docker/launch_elastic.sh"]
  command += [f"{tmp_path}/hosts", *runs.arguments(plain, tmp_path / "run")[1:]]
  command += ["--train_batch_size=12", "--global_batch_size=12", "--xla=off"]
  command += [f"--num_train_steps={UPDATES}", "--commit_every_steps=7"]
  # Horovod's own waiting, 30 s each.
  waits = {"GLOO_TIMEOUT": "10", "ELASTIC_REJOIN": "5"}
  env = {f"HOROVOD_{name}_SECONDS": value for name, value in waits.items()}
  with (
    open(tmp_path / "log", "w") as log,
    bed.popen(
      command, env={**os.environ, **env, "NIC": hosts.NIC}, stderr=log
    ) as process,
  ):
    told = (tmp_path / "log").read_text
    try:
      wait_until(lambda: updates(tmp_path) > 20 or process.poll())
      assert process.poll() is None, told()
      bed.link("host2", up=False)
      cut = updates(tmp_path)
      process.wait(timeout=runs.HANG_SECONDS)
      wait_until(lambda: not ranks_on(bed, "host2"))
    finally:
      bed.link("host2", up=True)
      process.kill()
  assert process.returncode == 0, told()[-3000:]
  assert cut < UPDATES
  assert told().count("a rank was lost after") == 1, told()
  assert "resuming with 1 ranks" in told()
  steps = runs.metrics(tmp_path / "run", "global_step")
  assert steps == list(range(1, UPDATES + 1))


def wait_until(done):
  give_up = time.monotonic() + runs.HANG_SECONDS
  while not done():
    assert time.monotonic() < give_up
    time.sleep(0.1)


def updates(folder):
  """How many are reported."""
  return len(runs.metrics(folder / "run"))


def ranks_on(bed, host):
  """Their process ids there."""
  script = "grep -lsz ^HOROVOD_RANK= /proc/[0-9]*/environ | cut -d/ -f3"
  return bed.run(["sh", "-c", script], host).stdout.split()


# Says who there is, on both hosts, and stays.
STAY = "ssh host2 sleep 1000 & echo ready; sleep 1000 & wait"


@pytest.mark.parametrize(
  "number, status",
  [(signal.SIGTERM, 143), (signal.SIGKILL, -9)],
  ids=["asked", "killed"],
)
def test_nothing_is_left_behind(bed, number, status):
  """Neither processes nor namespaces, even if nobody can clean up."""
  del bed  # that there can be one
  before = namespaces()
  command = ["-m", "benchmarks.network.hosts", "--hosts=2", "--"]
  command += ["bash", "-c", STAY]
  with subprocess.Popen(
    [PYTHON, *command], cwd=runs.ROOT, stdout=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout.readline() == "ready\n"
    made = namespaces() - before
    assert len(made) == 3, "two hosts and a switch"
    process.send_signal(number)
    assert process.wait(timeout=runs.HANG_SECONDS) == status
  wait_until(lambda: not made & namespaces())


def namespaces():
  """The network namespaces in which a process runs."""
  found = set()
  for process in psutil.process_iter():
    try:
      found.add(os.readlink(f"/proc/{process.pid}/ns/net"))
    except OSError:
      continue  # it has ended
  return found


def test_its_status_is_that_of_the_command(bed):
  del bed
  process = runs.launch(
    ["-m", "benchmarks.network.hosts", "--", "sh", "-c", "hostname; exit 7"]
  )
  assert process.returncode == 7
  assert process.stdout == "host1\n"
  assert "measured by plain TCP" in process.stderr
