"""The ranks of one horovodrun run these tests together: see test_lockstep.py.

All execute each test; what they share is in folders that all know. A rank
that fails ends its pytest, and horovodrun the other ranks.
"""

import os
import pathlib
import re

import numpy as np
import pytest
import runs
from samples import NO_DROPOUT, write_config, write_packed, write_records

from gradients import distributed

if "HOROVOD_RANK" not in os.environ:
  collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def comm():
  """All ranks."""
  return distributed.init()


@pytest.fixture(scope="session")
def slices(comm):
  """Both ranks, as the slices of one model."""
  del comm
  return distributed.init(tensor_parallel=2)


@pytest.fixture(scope="session")
def at_root(comm):
  """Makes something on rank 0 alone; returns the int that came of it."""

  def wait_for(make):
    made = make() if comm.is_root else 0
    number = made if isinstance(made, int) else 0
    return int(comm.gather(np.array([number]))[0, 0])

  return wait_for


@pytest.fixture(scope="session")
def session_folder():
  """The same on both ranks."""
  return pathlib.Path(os.environ["LOCKSTEP_FOLDER"])


@pytest.fixture
def tmp_path(request, session_folder):
  """A test's folder, the same on both ranks."""
  folder = session_folder / re.sub(r"\W+", "_", request.node.nodeid)
  folder.mkdir(exist_ok=True)
  return folder


@pytest.fixture(scope="session")
def plain(session_folder, at_root):
  """Config of one layer without dropout, and 2 x 60 records."""

  def make():
    for i in range(2):
      write_records(session_folder / f"plain-{i}.tfrecord", 60, seed=i)
    config = session_folder / "plain.json"
    write_config(config, num_hidden_layers=1, **NO_DROPOUT)

  at_root(make)
  return f"{session_folder}/plain.json", f"{session_folder}/plain-*"


@pytest.fixture(scope="session")
def whole_sizes(plain, session_folder):
  """What a rank alone holds: `runs.graph_sizes` of its training."""
  return runs.graph_sizes(plain, session_folder)


@pytest.fixture(scope="session")
def packed_run(session_folder, at_root):
  """Config, packed records; one rank's run of them, the batch in examples."""
  tiny = f"{session_folder}/packed.json", f"{session_folder}/packed/data-*"
  one = session_folder / "packed_one"

  def make():
    (session_folder / "packed").mkdir()
    _, global_batch = write_packed(session_folder / "packed")
    write_config(session_folder / "packed.json", **NO_DROPOUT)
    runs.pretrain(
      tiny, one, do_eval=True, global_batch_size=global_batch, num_train_steps=6
    )
    return global_batch

  return tiny, one, at_root(make)
