"""docker/: images, manifests and scripts, without a cluster.

They are held against the repository and each other. ssh, srun and Slurm's
commands are stand-ins. `tests/ranks/test_launch.py` has the ranks.
"""

import contextlib
import glob
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata

import pytest
import runs
import test_architecture
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from samples import parsed

from config.pretraining import PretrainingConfig

FOLDER = f"{runs.ROOT}/docker"
SCRIPTS = sorted(name for name in os.listdir(FOLDER) if name.endswith(".sh"))
# In images, where the checkout is and whose ssh keys are used.
CHECKOUT, HOME, USER_ID = "/workspace/perseus-bert", "/home/ubuntu", 1000


def read(name):
  """A file of docker/; ../NAME is one of the root."""
  with open(f"{FOLDER}/{name}", encoding="utf-8") as f:
    return f.read()


def manifest(name):
  return yaml.safe_load(read(name))


# Images and packages ----------------------------------------------------------


def test_images_are_made_of_what_the_repository_has():
  """Their CUDA is the pinned TensorFlow's, and one NCCL is pinned."""
  text = read("Dockerfile").replace("\\\n", " ")
  copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M)
  ignored = read("../.dockerignore").split()
  for source in " ".join(copied).split():
    assert os.path.exists(f"{runs.ROOT}/{source}"), source
    assert source.split("/")[0] not in ignored
  assert set(re.findall("^WORKDIR (.*)$", text, re.M)) == {CHECKOUT}
  assert re.findall("^USER (.*)$", text, re.M) == [f"{USER_ID}:{USER_ID}"]
  built = r"tensorflow (\S+) was built with CUDA ([\d.]+) "
  version, cuda = re.search(built, text).groups()
  assert listed("requirements/gpu.txt")["tensorflow"].specifier == (
    Requirement(f"tensorflow=={version}").specifier
  )
  assert f"FROM nvidia/cuda:{cuda}-base" in text
  nccl = listed("requirements/constraints.txt")["nvidia-nccl-cu12"].specifier
  build = read("../xla_patches/build_horovod.sh")
  assert f'"nvidia-nccl-cu$major{nccl}"' in build


def listed(name):
  """{package: Requirement} of a file of requirements and those it includes."""
  packages = {}
  for line in read(f"../{name}").splitlines():
    line = line.partition("#")[0].strip()
    if line.startswith("-r "):
      packages |= listed(os.path.join(os.path.dirname(name), line[3:]))
    elif line and not line.startswith("-c "):
      requirement = Requirement(line)
      packages[canonicalize_name(requirement.name)] = requirement
  return packages


def needed(names):
  """`names` of packages and all that these need, by what is installed here."""
  packages, left = set(), list(names)
  while left:
    name = canonicalize_name(left.pop())
    if name not in packages:
      packages.add(name)
      for requirement in map(Requirement, metadata.requires(name) or []):
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
          left.append(requirement.name)
  return packages


def test_images_have_what_the_code_imports_and_one_version_of_all():
  """But the packages of --report_to, of Ray and of GPUs."""
  imported = set()
  for name in test_architecture.MODULES:
    imported |= {i.split(".")[0] for i in test_architecture.imports(name)}
  own = {name.split(".")[0] for name in test_architecture.MODULES}
  # "compression" is a module of Python 3.14.
  imported -= own | set(sys.stdlib_module_names) | {"compression"}
  imported -= {"horovod", "mlflow", "wandb", "Stemmer", "faiss"}
  packages = metadata.packages_distributions()
  dockerfile = read("Dockerfile")
  files = re.findall(r"requirements/(\S+?).txt\b", dockerfile.split("# Our")[0])
  assert [*files] == ["$VARIANT", "search", "text", "constraints"]
  runs_with = needed(
    name for file in ("cpu", "search", "text")
    for name in listed(f"requirements/{file}.txt")
  )  # fmt: skip
  assert "numpy" in imported and "pytest" not in runs_with
  for name in imported:
    assert {*map(canonicalize_name, packages[name])} & runs_with, name
  files = ("cpu", "horovod", "text", "search", "tests", "constraints")
  lists = [listed(f"requirements/{name}.txt") for name in files]
  for name in needed(name for file in lists[:-1] for name in file):
    pins = [str(f[name].specifier) for f in lists if name in f]
    pins = list(filter(None, pins))
    assert len(pins) == 1 and pins[0].startswith("=="), (name, pins)


def test_all_requirements_can_be_installed_together():
  pins = {}
  for file in [
    "requirements.txt",
    *glob.glob("requirements/*.txt", root_dir=runs.ROOT),
  ]:
    for name, requirement in listed(file).items():
      if requirement.specifier:
        pins.setdefault(name, set()).add(str(requirement.specifier))
  assert all(len(versions) == 1 for versions in pins.values()), pins


# Manifests --------------------------------------------------------------------


def containers(name):
  """(spec of an MPIJob, launcher's pod and container, worker's)."""
  spec = manifest(name)["spec"]
  parts = []
  for role in ("Launcher", "Worker"):
    pod = spec["mpiReplicaSpecs"][role]["template"]["spec"]
    parts.append((pod, *pod["containers"]))
  return spec, *parts


def test_the_elastic_variant_has_the_same_workers_and_flags():
  """And both agree with the image, its scripts, and ssh's settings."""
  names = ("mpijob.yaml", "mpijob-elastic.yaml")
  fixed, elastic = (containers(name)[1:] for name in names)
  assert fixed[1] == elastic[1]
  flags = [f.replace("/base", "/elastic") for f in fixed[0][1]["command"][2:]]
  assert flags == elastic[0][1]["command"][2:]
  for name in names:
    spec, *parts = containers(name)
    for pod, container in parts:
      user = container["securityContext"]
      assert user["runAsUser"] == USER_ID and user["runAsNonRoot"]
      mounts = {m["name"] for m in container.get("volumeMounts", [])}
      assert mounts == {v["name"] for v in pod.get("volumes", [])}
      words = [w.removeprefix(f"{CHECKOUT}/") for w in container["command"]]
      scripts = [w for w in words if w.startswith("docker/")]
      assert scripts
      assert all(os.path.isfile(f"{runs.ROOT}/{w}") for w in scripts)
    (_, launcher), (_, worker) = parts
    gpus = worker["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == spec["slotsPerWorker"]
    # The scripts read the settings.
    text = read(launcher["command"][0].removeprefix("docker/"))
    for variable in launcher["env"]:
      assert f"${{{variable['name']}:" in text + read("hosts.sh"), variable
    assert spec["sshAuthMountPath"] == f"{HOME}/.ssh"
  client, server = read("ssh_config"), read("sshd_config")
  (port,) = re.findall(r"^ *Port (\d+)$", client, re.M)
  assert f"\nPort {port}\n" in server and int(port) > 1024  # it is not root
  assert f"\nHostKey {HOME}/.ssh/id_rsa\n" in server


def test_the_flags_of_manifests_are_a_runs():
  """Of a config that is there, and of what the ranks can share."""
  spec, (_, launcher), _ = containers("mpijob.yaml")
  config, _ = parsed(PretrainingConfig, launcher["command"][2:])
  workers = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
  ranks = workers * spec["slotsPerWorker"]
  assert config.global_batch_size % (ranks * config.train_batch_size) == 0


# Scripts ----------------------------------------------------------------------


def call(*words, cwd=runs.ROOT, env=os.environ):
  """A command and its output as text."""
  return subprocess.run(
    words, cwd=cwd, env=env, capture_output=True, text=True,
    timeout=runs.HANG_SECONDS,
  )  # fmt: skip


def list_hosts(hosts, slots=""):
  """What hosts.sh's list_hosts makes of `hosts`."""
  script = '. docker/hosts.sh; list_hosts "$1"'
  env = {**os.environ, "SLOTS": slots}
  return call("bash", "-ec", script, "test", str(hosts), env=env)


def test_hosts_are_listed_in_all_forms(tmp_path):
  (tmp_path / "lines").write_text("# all\n\na:8\nb.c-d:4 # half\n")
  (tmp_path / "mpi").write_text("a  slots=8\nb.c-d slots=4 max_slots=8\n")
  write_script(tmp_path / "script", "echo a", "echo b.c-d:4")
  for name in ("lines", "mpi", "script"):
    listed = list_hosts(tmp_path / name, slots="8").stdout
    assert listed == list_hosts("a:8,b.c-d:4").stdout == "a:8\nb.c-d:4\n"
  for wrong in ("a:0", "a:b", "no/such/file", "a:8:9"):
    process = list_hosts(wrong)
    assert process.returncode == 1 and process.stdout == ""
    assert f"'{wrong}' is not HOST:RANKS" in process.stderr


def write_script(path, *lines):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
  path.chmod(0o755)


def checkout(folder):
  """A checkout of the scripts, and ssh that reaches this machine only.

  It is reached under any name of the form 127.0.0.N. Like the real one, ssh's
  client does not pass on signals.
  """
  (folder / "docker").mkdir(parents=True)
  for name in SCRIPTS:
    write_script(folder / "docker" / name, read(name))
  (folder / ".venv").symlink_to(os.path.dirname(runs.BIN))
  for name in ("run_pretraining.py", "configs"):
    (folder / name).symlink_to(f"{runs.ROOT}/{name}")
  write_script(
    folder / "bin/ssh",
    # Options may come after the host, too.
    "while [ $# -gt 0 ]; do case $1 in",
    "  -o | -p | -i) shift 2 ;;",
    "  127.0.0.*) shift ;;",
    '  gone) echo "ssh: Could not resolve hostname gone" >&2; exit 255 ;;',
    "  *) break ;;",
    "esac; done",
    '[ -z "${NOISE:-}" ] || echo "$NOISE"',
    'setsid bash -c "$*" & wait $!',
  )
  return {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}


def launch(folder, env, hosts):
  command = f"{folder}/docker/launch.sh"
  return call(command, hosts, "--do_train", env=env)


def with_horovodrun(folder, *lines):
  """Gives a checkout a horovodrun of these lines, and a Python of none."""
  (folder / ".venv").unlink()
  write_script(folder / ".venv/bin/python")
  write_script(folder / ".venv/bin/horovodrun", *lines)


def test_hosts_that_cannot_be_used_are_named(tmp_path):
  """One that ssh does not reach, and the same checkout with other code."""
  env = checkout(tmp_path)
  process = launch(tmp_path, env, "gone:2,127.0.0.2:1")
  assert process.returncode == 1
  assert "launch.sh: error: not all hosts can be used" in process.stderr
  assert "gone: not ready: ssh: Could not resolve hostname" in process.stderr
  assert "127.0.0.2" not in process.stderr

  write_script(tmp_path / "docker/on_host.sh", "echo $((n = RANDOM)) 0")
  process = launch(tmp_path, env, "127.0.0.2:1")
  assert process.returncode == 1
  assert f"127.0.0.2: {tmp_path} has other code there" in process.stderr


def test_the_network_interface_is_for_several_machines(tmp_path):
  """Horovod ends with a traceback if ranks of one machine are given one."""
  env = {**checkout(tmp_path), "NIC": "eth7"}
  (tmp_path / ".venv").unlink()
  write_script(tmp_path / ".venv/bin/python")
  write_script(tmp_path / ".venv/bin/horovodrun", 'echo "$*"')
  alone = launch(tmp_path, env, "localhost:2")
  assert "-np 2 -H localhost:2" in alone.stdout, alone.stderr
  assert "--network-interfaces" not in alone.stdout
  two = launch(tmp_path, env, "localhost:1,127.0.0.2:1")
  assert "--network-interfaces eth7" in two.stdout, two.stderr


def test_a_host_that_is_lost_while_ssh_is_connected_is_no_host(tmp_path):
  """ssh then waits for ever, and all of an elastic run would with it."""
  env = checkout(tmp_path)
  write_script(
    tmp_path / "bin/ssh",
    "echo what: a shell prints",
    '[[ "$*" != *lost* ]] || sleep 1000',
  )
  write_script(
    tmp_path / "bin/timeout", f'{shutil.which("timeout")} 1 "${{@:2}}"'
  )
  (tmp_path / "hosts").write_text("host1:1\nlost:1\nhost2:1\n")
  script = f"{tmp_path}/docker/launch_elastic.sh"
  process = call(script, "--discover", "hosts", cwd=tmp_path, env=env)
  assert process.stdout.split() == ["host1:1", "host2:1"]


@contextlib.contextmanager
def left_over_rank(folder, env):
  """A rank of `--do_train`, as an earlier start left it on a host; its run."""
  script = '. docker/hosts.sh; name_run "$@"; echo $PERSEUS_BERT_RUN'
  words = ("bash", "-ec", script, "test", "--do_train")
  name = call(*words, cwd=folder, env=env).stdout.strip()
  mark = {"PERSEUS_BERT_RUN": name, "HOROVOD_HOSTNAME": "127.0.0.2"}
  rank = subprocess.Popen(["sleep", "60"], env={**env, **mark})
  try:
    yield rank, name
  finally:
    rank.kill()


def test_ranks_left_by_an_earlier_start_are_noticed_and_ended(tmp_path):
  env = checkout(tmp_path)
  with left_over_rank(tmp_path, env) as (rank, name):
    process = launch(tmp_path, env, "127.0.0.2:1")
    assert process.returncode == 1
    assert "127.0.0.2: 1 ranks of an earlier start" in process.stderr
    assert rank.poll() is None
    script = f"{tmp_path}/docker/on_host.sh"
    assert call(script, "end", name, "any", "5", env=env).stdout == "1\n"
    assert rank.wait(5) == -signal.SIGTERM


def test_a_second_elastic_start_leaves_the_first_alone(tmp_path):
  """It is refused, and what it ends when it fails are its own ranks.

  What a shell on a host prints by itself changes nothing.
  """
  env = {**checkout(tmp_path), "NOISE": "welcome to a:b"}
  with_horovodrun(tmp_path, "exit 3")
  (tmp_path / "hosts").write_text("127.0.0.2:1\n")
  elastic = [f"{tmp_path}/docker/launch_elastic.sh", "hosts", "--do_train"]

  start = lambda **more: call(*elastic, cwd=tmp_path, env={**env, **more})
  with left_over_rank(tmp_path, env) as (rank, _):
    process = start()
    assert process.returncode == 1, process.stderr
    assert "1 ranks of an earlier start of this command" in process.stderr
    # Of another command no rank is there to begin with, and none is ended.
    elastic.append("--seed=2")
    process = start()
    assert process.returncode == 3 and "left over" not in process.stderr
    assert rank.poll() is None
    elastic.pop()
    process = start(TAKE_OVER="1")
    assert process.returncode == 3, process.stderr
    assert rank.wait(5) == -signal.SIGTERM


LAUNCHED = "launch.sh node1:8,node2:8 --do_train --input_file=a*"
BY_SRUN = LAUNCHED.replace("launch.sh", "launch_srun.sh")
AGAIN = "scontrol requeue 7"
WAITS = "trap 'exit 75' TERM; while true; do sleep 0.05; done"
# What the run does, the job's circumstances, its status, and what it calls.
JOBS = {
  "well": ("exit 0", {}, 0, [LAUNCHED]),
  "failed": ("exit 1", {}, 1, [LAUNCHED]),
  "stopped": ("exit 75", {}, 0, [LAUNCHED, AGAIN]),
  "stopped by Slurm": (WAITS, {}, 0, [LAUNCHED, AGAIN]),
  "cancelled": ("exit 75", {"state": "COMPLETING"}, 75, [LAUNCHED]),
  "srun": ("exit 75", {"launch": "srun"}, 0, [BY_SRUN, AGAIN]),
  "ssh": ("exit 0", {"launch": "ssh"}, 0, [LAUNCHED]),
  "unknown": ("exit 0", {"launch": "mpi"}, 1, []),
}


@pytest.mark.parametrize("last, job, status, called", JOBS.values(), ids=JOBS)
def test_slurm_ends_with_the_status_of_the_run_or_goes_on_after_a_stop(
  tmp_path, capfd, last, job, status, called
):
  """By ssh or srun, as asked; a cancelled job is left alone."""
  # Only the script gets the signal, five minutes before the time is up.
  assert "\n#SBATCH --signal=B:TERM@300\n#SBATCH --requeue\n" in read(
    "slurm.sh"
  )
  calls, place = tmp_path / "calls", tmp_path / "docker"
  calls.touch()
  log = f'echo "$(basename "$0")" "$@" >>{shlex.quote(str(calls))}'
  write_script(
    tmp_path / "bin/scontrol",
    '[ "$1" != show ] || { echo node1; echo node2; }',
    f'[ "$1" != requeue ] || {log}',
  )
  write_script(tmp_path / "bin/squeue", f"echo {job.get('state', 'RUNNING')}")
  for name in ("launch.sh", "launch_srun.sh"):
    write_script(place / name, log, last)
  # As Slurm does it: a copy, from elsewhere.
  write_script(tmp_path / "spool/slurm_script", read("slurm.sh"))
  env = {
    "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS_ON_NODE": "8",
  }  # fmt: skip
  if "launch" in job:
    env["LAUNCH"] = job["launch"]
  process = subprocess.Popen(
    [tmp_path / "spool/slurm_script", "--do_train", "--input_file=a*"],
    env=os.environ | env,
  )
  if last == WAITS:  # SIGTERM comes when the run has begun
    while not calls.read_text():
      time.sleep(0.05)
    process.terminate()
  assert process.wait(runs.HANG_SECONDS) == status
  assert calls.read_text().splitlines() == called
  said = "error: LAUNCH=mpi is unknown: give ssh or srun"
  assert (said in capfd.readouterr().err) == (not called)


def srun_job(tmp_path):
  """A job of Slurm in a checkout, for launch_srun.sh.

  srun is a stand-in that starts its tasks on this machine, notes its words and
  its tasks' ids, and kills them at SIGTERM, as the real one. scancel sends
  SIGTERM to them. Returns launch_srun.sh and the environment.
  """
  env = checkout(tmp_path / "checkout")
  bin_folder = tmp_path / "checkout/bin"
  write_script(
    bin_folder / "srun",
    f'echo $$ >{tmp_path}/srun; echo "$*" >{tmp_path}/words',
    "while [[ $1 == --* ]]; do",
    "  case $1 in",
    "    --ntasks=*) tasks=${1#*=} ;;",
    "    --ntasks-per-node=*) on_node=${1#*=} ;;",
    "  esac",
    "  shift",
    "done",
    "trap 'kill -KILL \"${pids[@]}\"; exit 137' TERM",
    "for ((i = 0; i < tasks; i++)); do",
    '  SLURM_PROCID=$i "$@" &',
    "  pids+=($!)",
    "done",
    f'echo "${{pids[@]}}" >{tmp_path}/tasks',
    "highest=0",
    'for pid in "${pids[@]}"; do',
    "  status=0",
    '  wait "$pid" || status=$?',
    "  ((status <= highest)) || highest=$status",
    "done",
    "exit $highest",
  )
  write_script(
    bin_folder / "scancel",
    '[ "$*" = "--signal=TERM 7" ] || exit 1',
    f"kill -TERM $(cat {tmp_path}/tasks)",
  )
  more = {"SLURM_JOB_ID": "7", "PYTHONPATH": runs.ROOT}
  return f"{tmp_path}/checkout/docker/launch_srun.sh", {**env, **more}


@pytest.fixture
def start_step(tmp_path):
  """Starts a job's step whose ranks run these lines of Python."""
  script, env = srun_job(tmp_path)
  training = tmp_path / "checkout/run_pretraining.py"

  def start(hosts, *lines, words=(), **more):
    training.unlink()
    training.write_text("\n".join(["import os, signal, sys, time", *lines, ""]))
    return subprocess.Popen(
      [script, hosts, "--do_train", *words], env={**env, **more},
      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

  return start


def test_srun_starts_what_horovodrun_does(start_step, tmp_path):
  """Each rank with its place, and a server that all of them reach."""
  process = start_step(
    "127.0.0.2:2,127.0.0.3:2",
    "from horovod.runner.http import http_client",
    "address = os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']",
    "port = int(os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT'])",
    "rank = os.environ['HOROVOD_RANK']",
    "http_client.put_data_into_kvstore(address, port, 'test', rank, rank)",
    "read = http_client.read_data_from_kvstore(address, port, 'test', rank)",
    "assert read == rank",
    "keys = 'HOSTNAME RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE'",
    "keys += ' CONTROLLER CPU_OPERATIONS GLOO_IFACE'",
    "line = [os.environ['HOROVOD_' + key] for key in keys.split()]",
    # At once: print writes each word alone, which another rank's may follow.
    "os.write(1, (' '.join([*line, *sys.argv[1:]]) + '\\n').encode())",
    words=["--input_file=a b*"],
  )
  out, told = process.communicate(timeout=runs.HANG_SECONDS)
  assert process.returncode == 0, told
  assert sorted(out.splitlines()) == [
    f"127.0.0.{host + 2} {2 * host + rank} 4 {rank} 2 {host} 2 gloo gloo lo "
    "--do_train --input_file=a b*"
    for host in range(2)
    for rank in range(2)
  ]
  words = (tmp_path / "words").read_text()
  assert words.startswith("--nodes=2 --ntasks=4 --ntasks-per-node=2 --distrib")


@pytest.mark.parametrize("signals", [1, 2])
def test_ranks_of_srun_are_asked_to_end_once(start_step, tmp_path, signals):
  """By Slurm; a second signal ends them at once. The highest status counts.

  The network interface is the one that is named.
  """
  process = start_step(
    "127.0.0.2:2",
    "stop = lambda *_: sys.exit(75)",
    f"signal.signal(signal.SIGTERM, stop if {signals} == 1 else lambda *_: 0)",
    "names = ('HOROVOD_GLOO_IFACE', 'HOROVOD_RANK')",
    f"path = '{tmp_path}/' + ''.join(os.environ[name] for name in names)",
    "open(path, 'w').close()",
    "while True: time.sleep(0.05)",
    NIC="ib",
  )
  while not all((tmp_path / f"ib{rank}").exists() for rank in range(2)):
    assert process.poll() is None
    time.sleep(0.05)
  process.terminate()
  if signals == 2:
    assert "asked the ranks to save" in process.stderr.readline()
    process.terminate()
  process.communicate(timeout=runs.HANG_SECONDS)
  assert process.returncode == (75 if signals == 1 else 137)


@pytest.mark.parametrize(
  "hosts, job, said",
  [
    ("a:1", "", "this is no job of Slurm: start it by slurm.sh"),
    ("a:1,b:2", "7", "a:1,b:2 is no list HOST:RANKS,HOST:RANKS with as many"),
    ("no.invalid:1", "7", "the name no.invalid is not known on"),
  ],
)
def test_what_srun_cannot_start_is_refused(start_step, hosts, job, said):
  process = start_step(hosts, SLURM_JOB_ID=job)
  _, told = process.communicate(timeout=runs.HANG_SECONDS)
  assert process.returncode == 1
  assert said in told and "Traceback" not in told
