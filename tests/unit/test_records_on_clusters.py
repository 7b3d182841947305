"""Records on clusters: the examples of docker/ and docs/, without a cluster.

They are held against the flags, the image and each other.
"""

import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import runs
from samples import contents, parsed, write_documents
from test_deployment import FOLDER, USER_ID, call, manifest, read

from records import creation
from workers import launchers


def records_command(words):
  """The settings of a command that makes records, without its script."""
  return parsed(creation.CreationSettings, words)[0]


def check_pod(pod):
  """Its user and volume are those of the image and of the other manifests."""
  (container,) = pod["containers"]
  assert container["securityContext"]["runAsUser"] == USER_ID
  assert container["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]
  (volume,) = pod["volumes"]
  assert volume["persistentVolumeClaim"]["claimName"] == "perseus-bert-data"
  return container


def test_the_indexed_job_is_a_run_of_all_its_pods():
  job = manifest("records-job.yaml")
  spec = job["spec"]
  assert spec["completionMode"] == "Indexed"
  container = check_pod(spec["template"]["spec"])
  # Kubernetes refuses the policy with another one.
  assert spec["template"]["spec"]["restartPolicy"] == "Never"
  disrupted, failed = spec["podFailurePolicy"]["rules"]
  assert disrupted["action"] == "Ignore"  # before status 1: SIGTERM has it, too
  assert failed["onExitCodes"]["containerName"] == container["name"]
  python, script, *words = container["command"]
  assert python == ".venv/bin/python" and script == "create_pretraining_data.py"
  made = records_command(words)
  pod = {"JOB_COMPLETION_INDEX": "15", "HOSTNAME": "records-x7k2p-15"}
  worker = launchers.worker_of(made.workers, pod)
  assert worker == ("records-x7k2p", 15, spec["completions"], 1)
  cpus = container["resources"]["requests"]["cpu"]
  assert str(made.workers.num_workers) == cpus


def test_a_slurm_array_makes_records_one_worker_after_another(
  tmp_path, letters
):
  for name in (".venv", "create_pretraining_data.py"):
    source = os.path.dirname(runs.BIN) if name == ".venv" else name
    (tmp_path / name).symlink_to(os.path.join(runs.ROOT, source))
  write_documents(tmp_path / "text.txt", 60)
  words = [
    "create_pretraining_data.py", "--input_file=text.txt",
    f"--vocab_file={letters}", "--num_shards=3", "--dupe_factor=2",
  ]  # fmt: skip
  slurm = {
    "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "1",
    "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_MIN": "1",
    "SLURM_PROCID": "0",
  }  # fmt: skip

  def run(folder, task, tasks):
    env = {**os.environ, **slurm, "SLURM_ARRAY_TASK_COUNT": str(tasks)}
    env["SLURM_ARRAY_TASK_ID"], script = str(task), f"{FOLDER}/slurm_records.sh"
    output = f"--output_file={folder}/a.tfrecord"
    process = call(script, *words, output, cwd="/", env=env)
    assert process.returncode == 0, process.stderr
    return "manifest  " in process.stdout

  tables = [run("out", task, tasks=3) for task in (1, 2, 3)]
  assert tables == [True, False, False]
  assert not list(tmp_path.glob("out/*.unfinished"))
  assert run("alone", 1, tasks=1)
  assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def fake_spark():
  """Modules with which the example's tasks run here."""
  spark = mock.MagicMock()
  tasks = spark.SparkSession.builder.getOrCreate().sparkContext.parallelize
  tasks.return_value.mapPartitionsWithIndex = lambda work: mock.Mock(
    collect=lambda: [next(work(n, iter(()))) for n in tasks.call_args.args[0]]
  )
  return {"pyspark": mock.Mock(), "pyspark.sql": spark}


def fake_ray():
  decorated = lambda work: mock.Mock(remote=work)
  return {"ray": mock.Mock(remote=lambda **_: decorated, get=list)}


@pytest.mark.parametrize(
  "library, fake", [("pyspark", fake_spark), ("ray", fake_ray)]
)
def test_an_example_starts_all_workers(monkeypatch, capsys, library, fake):
  page = read("../docs/data.md")
  blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
  is_of = re.compile(rf"^(import|from) {library}\b", re.M)
  (example,) = filter(is_of.search, blocks)
  started = []

  def run(command, cwd, **_):
    started.append(command)
    return subprocess.CompletedProcess(command, 0, stdout="table", stderr="")

  for name, module in fake().items():
    monkeypatch.setitem(sys.modules, name, module)
  monkeypatch.setattr(subprocess, "run", run)
  exec(example, {})
  made = [records_command(command[2:]).workers for command in started]
  assert [worker.worker for worker in made] == list(range(16))
  assert {worker.workers for worker in made} == {16}
  assert len({worker.run for worker in made}) == 1
  assert capsys.readouterr().out.count("table") == 16
