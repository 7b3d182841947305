"""Workers as tasks of Ray: what one does, and clusters that lose a machine.

The tests with clusters are slow and need requirements/ray.txt.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types

import psutil
import pytest
import runs
from samples import contents, create, write_documents

from common import errors
from tools import ray_workers

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs requirements/ray.txt")


class Lines(list):
  """Stands for the queue that the driver reads."""

  put = list.append

  def qsize(self):
    return len(self)

  def get_nowait_batch(self, count):
    batch, self[:] = self[:count], self[count:]
    return batch


def work(script, folder=runs.ROOT):
  """What a worker returns that runs Python code, and what it says."""
  lines = Lines()
  command = [sys.executable, "-c", script]
  return ray_workers._work(3, command, __file__, folder, lines), lines


def test_a_worker_passes_on_what_its_command_says():
  note = "import sys; print('note', file=sys.stderr); print('table'); "
  error = "print('x.py: error: no', file=sys.stderr); sys.exit(7)"
  for script, end in {
    note: (0, "table\n"),
    note + error: (7, "x.py: error: no"),
  }.items():
    starts = f"worker 3: starts on {os.uname().nodename}"
    assert work(script) == (end, [starts, "worker 3: note"])
  # Ray starts it again after this error.
  with pytest.raises(ChildProcessError, match="killed by signal 9"):
    work("import os; os.kill(os.getpid(), 9)")
  # A machine without the script is named.
  status, error = ray_workers._work(0, [], "/no/script.py", "/", Lines())
  assert status == 1
  assert error.startswith(
    f"ray_workers.py: error: {os.uname().nodename} has no /no/script.py"
  )


def test_a_command_is_asked_to_end_when_its_task_is_to_stop(tmp_path):
  """Ray interrupts the task's thread; the command says nothing by then."""
  script = (
    "import signal, sys, time\n"
    "def stop(*_):\n"
    f"  open('{tmp_path}/asked', 'w')\n"
    "  sys.exit()\n"
    "signal.signal(signal.SIGTERM, stop)\n"
    f"open('{tmp_path}/ready', 'w')\n"
    "time.sleep(600)\n"
  )

  def interrupt():
    while not (tmp_path / "ready").exists():
      time.sleep(0.05)
    time.sleep(0.5)  # Ray asks none that just starts
    os.kill(os.getpid(), signal.SIGINT)

  # A background job ignores it.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
      work(script)
  finally:
    signal.signal(signal.SIGINT, before)
  assert (tmp_path / "asked").exists()


class OneAtATime:
  """Stands for Ray: each call of `wait` ends one task."""

  def __init__(self, lines, said):
    self._lines, self._said = lines, said

  def wait(self, tasks, timeout):
    self._lines.extend(self._said.pop(0))
    return tasks[:1], tasks[1:]

  def get(self, task):
    return task


def test_the_newest_progress_of_all_is_shown(capsys):
  lines, tasks = Lines(), [(0, ""), (0, "table\n")]
  first, older, newest, last = (
    "worker 0: starts on a",
    "worker 0: 10:00:01  tokenizing: 1 of 9 MB",
    "worker 1: 10:00:02  tokenizing: 2 of 9 MB",
    "worker 1: a note",
  )
  ray = OneAtATime(lines, [[first, older, newest], [last]])
  assert ray_workers._await(ray, tasks, lines) == (0, "table\n")
  assert capsys.readouterr().err.splitlines() == [first, newest, last]
  # The first error ends all.
  tasks = [(1, "x.py: error: no"), (0, "")]
  ray = OneAtATime(Lines(), [[]])
  assert ray_workers._await(ray, tasks, Lines()) == (1, "x.py: error: no")


def test_a_worker_that_is_lost_again_and_again_is_one_line():
  class RayError(Exception):
    pass

  class Lost(OneAtATime):
    exceptions = types.SimpleNamespace(RayError=RayError)

    def get(self, task):
      error = RayError("a page of text")
      error.cause = ChildProcessError("killed by signal 9")
      raise error

  lost = "a worker was lost 21 times: killed by signal 9: give it more memory"
  with pytest.raises(errors.UserError, match=lost):
    ray_workers._await(Lost(Lines(), [[]]), ["task"], Lines())


def test_without_ray_a_line_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "ray", None)
  words = "ray is not installed: .venv/bin/pip install -r requirements/ray.txt"
  with pytest.raises(errors.UserError, match=words):
    ray_workers._connect("auto")
  assert os.path.exists(f"{runs.ROOT}/requirements/ray.txt")


# Clusters ---------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, letters, monkeypatch):
  """The driver of two workers that make 8 shards, for its name of a folder."""
  write_documents(tmp_path / "long.txt", 1000)
  monkeypatch.setenv("HOME", str(tmp_path))  # ~/.ray
  for name in ("MODE", "TOKEN", "TOKEN_PATH"):
    monkeypatch.delenv(f"RAY_AUTH_{name}", raising=False)
  return lambda out, *more: [
    sys.executable, "-m", "tools.ray_workers", "--workers=2", *more, "--",
    "create_pretraining_data.py", f"--input_file={tmp_path}/long.txt",
    f"--vocab_file={letters}", f"--output_file={tmp_path}/{out}/train.tfrecord",
    "--max_seq_length=32", "--max_predictions_per_seq=6", "--num_shards=8",
    "--dupe_factor=60",
  ]  # fmt: skip


def start(command):
  pipe = subprocess.PIPE
  return subprocess.Popen(
    command, cwd=runs.ROOT, stdout=pipe, stderr=pipe, text=True
  )


def wait_for_a_shard(folder):
  end = time.monotonic() + runs.HANG_SECONDS
  while not list(folder.glob("*.unfinished/0/work/shards/*.result")):
    assert time.monotonic() < end, "no shard was made"
    time.sleep(0.05)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
  """Two machines of one CPU, with a token: (address, raylet of the second)."""
  (tmp_path / "token").write_text(32 * "a")
  monkeypatch.setenv("RAY_AUTH_MODE", "token")
  monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", f"{tmp_path}/token")
  ray = os.path.join(runs.BIN, "ray")
  script = (
    "import sys\n"
    "from ray.cluster_utils import Cluster\n"
    "size = dict(num_cpus=1, object_store_memory=80 << 20)\n"
    "cluster = Cluster(True, head_node_args=size)\n"
    "node = cluster.add_node(**size)\n"
    "raylet = node.all_processes['raylet'][0].process.pid\n"
    "print('up', cluster.address, raylet, flush=True)\n"
    "sys.stdin.read()\n"
    "cluster.shutdown()\n"
  )
  assert os.path.exists(ray)
  process = subprocess.Popen(
    [sys.executable, "-c", script], stdin=subprocess.PIPE,
    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
  )  # fmt: skip
  for line in process.stdout:
    if line.startswith("up "):
      _, address, raylet = line.split()
      break
  yield address, int(raylet)
  process.communicate(timeout=runs.HANG_SECONDS)


@needs_ray
@pytest.mark.slow
def test_a_lost_machine_changes_no_byte(tmp_path, letters, command, cluster):
  address, raylet = cluster
  words = command("ray", f"--address={address}")
  # Without the token, one line.
  given = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH_")}
  done = subprocess.run(
    words, cwd=runs.ROOT, env=given, capture_output=True, text=True
  )
  assert done.returncode == 1
  (line,) = done.stderr.splitlines()
  assert line.startswith(f"ray_workers.py: error: --address={address}: ")
  assert "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE" in line
  driver = start(words)
  wait_for_a_shard(tmp_path / "ray")
  machine = psutil.Process(raylet)
  processes = [*machine.children(recursive=True), machine]
  names = [" ".join(process.cmdline()) for process in processes]
  assert any("create_pretraining_data.py" in name for name in names), names
  for process in processes:
    process.kill()
  out, err = driver.communicate(timeout=runs.HANG_SECONDS)
  assert driver.returncode == 0, err
  starts = re.findall(r"^worker (\d): starts on ", err, flags=re.M)
  assert sorted(starts) in (["0", "0", "1"], ["0", "1", "1"])
  assert out.count("manifest  ") == 1  # one closing screen
  assert not set(err.splitlines()) & set(out.splitlines())
  ours = re.compile(r"worker \d: |2 workers of 1 of 2 CPUs$")
  assert all(map(ours.match, err.splitlines()))
  create(
    tmp_path, f"{tmp_path}/long.txt", letters, num_shards=8, dupe_factor=60,
    output_file=f"{tmp_path}/alone/train.tfrecord",
  )  # fmt: skip
  assert contents(tmp_path / "ray") == contents(tmp_path / "alone")


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_keeps_what_is_finished(tmp_path, letters, command, number):
  driver = start(command("ray"))
  wait_for_a_shard(tmp_path / "ray")
  driver.send_signal(number)
  _, err = driver.communicate(timeout=runs.HANG_SECONDS)
  assert driver.returncode == 75
  name = signal.Signals(number).name
  asked = f"{name}: stopped as asked: the same command completes it"
  assert asked in err.splitlines() and "Traceback" not in err
  (start_of_work,) = tmp_path.glob("ray/*.unfinished/0")
  assert not os.listdir(start_of_work / "workers")
  made = len(list(start_of_work.glob("work/shards/*.result")))
  again = start(command("ray"))
  out, err = again.communicate(timeout=runs.HANG_SECONDS)
  assert again.returncode == 0, err
  assert 0 < made <= int(re.search(r"(\d) of 8 shards made before", out)[1])
  assert not (tmp_path / ".ray").exists()
  mine = lambda process: str(tmp_path) in " ".join(process.cmdline())
  assert not any(map(mine, psutil.process_iter(["cmdline"])))
