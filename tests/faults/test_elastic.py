"""Ranks that are killed, leave or come: the run goes on from its last commit.

`localhost` and `127.0.0.1` are two hosts to Horovod.
"""

import contextlib
import os
import re
import signal
import time

import numpy as np
import psutil
import pytest
import runs
from samples import NO_DROPOUT, write_config, write_records

from common.errors import UserError
from training import training_run

UPDATES = 500
FLAGS = [
  f"--num_train_steps={UPDATES}", "--learning_rate=1e-4",
  "--train_batch_size=12", "--global_batch_size=12",
  "--save_checkpoints_steps=1000", "--xla=off",
]  # fmt: skip


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
  """Config without dropout, records, and the losses of one rank."""
  folder = tmp_path_factory.mktemp("data")
  write_records(folder / "data-0.tfrecord", 120)
  config = write_config(folder / "config.json", **NO_DROPOUT)
  tiny = config, str(folder / "data-*.tfrecord")
  runs.pretrain(
    tiny, folder / "one", num_train_steps=UPDATES, learning_rate=1e-4,
    train_batch_size=12, global_batch_size=12,
  )  # fmt: skip
  return tiny, folder / "one"


class Job:
  """An elastic run, its hosts, and what is done to it as it goes."""

  def __init__(self, folder, tiny_run, hosts):
    self._folder, self._tiny = folder, tiny_run
    self._hosts, self._script = folder / "hosts", folder / "discover.sh"
    self._script.write_text(f"#!/bin/sh\ncat {self._hosts}\n")
    self._script.chmod(0o755)
    self.set_hosts(hosts)
    self.output = folder / "run"

  def set_hosts(self, hosts):
    aside = self._folder / "hosts.new"
    aside.write_text("".join(f"{host}\n" for host in hosts))
    os.replace(aside, self._hosts)

  def run(self, events, flags=(), least=1, most=2):
    """Runs to the end; `events` are done in turn, each when it returns True.

    Between `least` and `most` ranks.
    """
    waiting = list(events)

    def step():
      if waiting and waiting[0]():
        del waiting[0]
      return False  # never stop

    training = runs.arguments(self._tiny, self.output)
    launcher = f"-np {least} --min-np {least} --max-np {most}"
    launcher += f" --host-discovery-script {self._script}"
    process = runs.launch(
      [*training, *FLAGS, "--commit_every_steps=7", *flags],
      launcher=f"{launcher} --network-interfaces lo".split(),
      stop=step,
    )
    assert not waiting, process.stderr[-3000:]
    return process

  def updates(self):
    return len(runs.metrics(self.output))

  def ranks(self):
    """Host -> process id of its rank."""
    wanted, found = f"--output_dir={self.output}", {}
    for process in psutil.process_iter():
      # Some are gone, or not ours.
      with contextlib.suppress(psutil.Error, KeyError, IndexError):
        words = process.cmdline()
        if words[0].endswith("/python") and wanted in words:
          found[process.environ()["HOROVOD_HOSTNAME"]] = process.pid
    return found

  def check(self, process, whole):
    """Each update once, with the losses of a run that nothing happened to."""
    assert process.returncode == 0, process.stderr[-4000:]
    steps = runs.metrics(self.output, "global_step")
    assert steps == list(range(1, UPDATES + 1))
    np.testing.assert_allclose(
      runs.metrics(self.output), runs.metrics(whole), rtol=1e-5
    )
    assert runs.weights(self.output)["training_state/samples_seen"] == (
      UPDATES * 12
    )
    assert not self.ranks(), "left behind"


def test_a_killed_rank_is_left_behind(plain_run, tmp_path):
  tiny, whole = plain_run
  job = Job(tmp_path, tiny, ["localhost:1", "127.0.0.1:1"])

  def kill():
    if job.updates() < 20:
      return False
    ranks = job.ranks()
    assert len(ranks) == 2
    os.kill(ranks["127.0.0.1"], signal.SIGKILL)
    return True

  process = job.run([kill])
  job.check(process, whole)
  told = process.stderr
  assert "a rank was lost after" in told and "back to update" in told
  assert "resuming with 1 ranks" in told
  assert "left in memory" in told


@pytest.mark.slow
def test_ranks_come_and_one_is_asked_to_leave(plain_run, tmp_path):
  """A host is added; then SIGTERM, as a spot instance gets it, to one rank."""
  tiny, whole = plain_run
  job = Job(tmp_path, tiny, ["localhost:1"])

  def add():
    if job.updates() < 20:
      return False
    job.set_hosts(["localhost:1", "127.0.0.1:1"])
    return True

  seen = []

  def leave():
    ranks = job.ranks()
    if len(ranks) < 2:
      return False
    if not seen:
      seen.append(job.updates())
    if job.updates() < seen[0] + 20:
      time.sleep(0.2)
      return False
    os.kill(ranks["127.0.0.1"], signal.SIGTERM)
    return True

  # A commit at the start and none later: what is not repeated was taken over.
  process = job.run([add, leave], ["--commit_every_steps=1000"])
  job.check(process, whole)
  told = process.stderr
  kept = re.findall(r"back to (update [\d,]+|the start)", told)
  assert kept and "the start" not in kept
  assert min(int(words.split()[1].replace(",", "")) for words in kept) >= 20
  assert told.count("resuming with 2 ranks") == 1
  assert "SIGTERM: leaves the run, the others continue" in told
  assert told.count("resuming with 1 ranks") == 1


def test_what_depends_on_the_number_of_ranks_is_refused(tiny_run):
  config = runs.config(tiny_run, "run", lr_scaling="sqrt")
  with pytest.raises(UserError, match="--lr_scaling=sqrt cannot depend on"):
    training_run.check_elastic(config)
  few = dict(global_batch_size=16, num_accumulation_steps=2)
  with pytest.raises(UserError, match="--num_accumulation_steps=2: under horo"):
    training_run.check_elastic(runs.config(tiny_run, "run", **few))


@pytest.mark.slow
def test_three_elastic_ranks_equal_three_fixed_ones_to_the_bit(
  plain_run, tmp_path
):
  """A sum over three depends on its order, as one over two does not."""
  tiny, fixed = plain_run[0], tmp_path / "fixed"
  few = ["--num_train_steps=60"]
  runs.complete(tiny, fixed, 3, [*FLAGS, *few])
  job = Job(tmp_path, tiny, ["localhost:2", "127.0.0.1:1"])
  process = job.run([], few, least=3, most=3)
  assert process.returncode == 0, process.stderr[-4000:]
  assert len(runs.metrics(fixed)) == 60
  for key in ("loss", "grad_norm"):
    assert runs.metrics(job.output, key) == runs.metrics(fixed, key)
  expected = runs.weights(fixed)
  for name, value in runs.weights(job.output).items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)
