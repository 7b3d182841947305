"""Which worker of how many this command is, by flags or its launcher."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from common import console
from common.errors import UserError, end_on_signals
from common.settings import check, setting
from workers.work_dir import Worker, alone


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
  """Who does the work; nothing here changes the output."""

  # fmt: off
  num_workers: int | None = setting(None,
    "Worker processes on each machine. Default: all cores. What is made "
    "is the same for any number.", low=1, high=4096)
  workers: int | None = setting(None,
    "How many of this command share the work, on one machine or several that "
    "see the same folders. They may run one after another. Default: what "
    "horovodrun, a Slurm array or srun says, or 1.", low=1, high=100_000)
  worker: int | None = setting(None,
    "Number of this command among --workers, from 0. Default: what "
    "horovodrun, Slurm or a Kubernetes Indexed Job says.", low=0)
  run: str = setting("",
    "Name of this start of --workers, the same for all of them and another for "
    "the next start. A worker that comes when its run's files are there does "
    "nothing. Default: the job's number in Slurm, its name in Kubernetes.")
  # fmt: on

  def __post_init__(self):
    check(self)


class _Launcher(NamedTuple):
  """Environment variables of something that starts commands together."""

  worker: str  # number of the worker
  run: tuple[str, ...]  # joined, they name the run; some may be missing
  workers: str = ""  # number of workers; "": --workers says it
  first: str = ""  # the number of the first worker, if it is not 0
  local: str = ""  # number of workers on this machine
  step: str = ""  # set in what it started; "": in all that has a number
  shell: str = ""  # set also in a shell that a person works in


# The first that started this process counts: horovodrun may run in a job of
# Slurm, and a task of a Slurm array has a SLURM_PROCID, too, as has the shell
# of any batch script.
_LAUNCHERS = (
  _Launcher(
    "HOROVOD_RANK",
    ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    "HOROVOD_SIZE", local="HOROVOD_LOCAL_SIZE",
  ),
  _Launcher(
    "SLURM_ARRAY_TASK_ID", ("SLURM_ARRAY_JOB_ID",),
    "SLURM_ARRAY_TASK_COUNT", first="SLURM_ARRAY_TASK_MIN",
  ),
  _Launcher(
    "SLURM_PROCID", ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_NTASKS",
    step="SLURM_STEP_ID", shell="SLURM_PTY_PORT",
  ),
  # A pod of an Indexed Job has the host name JOB-INDEX.
  _Launcher("JOB_COMPLETION_INDEX", ("HOSTNAME",)),
)  # fmt: skip
_NONE = _Launcher("", ())


def _launcher_of(environ: Mapping[str, str]) -> _Launcher:
  """What started this very process together with others, or `_NONE`."""
  # Steps that are started in a shell of srun --pty have its variables, too.
  is_task = environ.get("SLURM_TASK_PID") == str(os.getpid())
  for row in _LAUNCHERS:
    is_started = not row.step or row.step in environ
    in_shell = row.shell in environ and not is_task
    if environ.get(row.worker, "").isdigit() and is_started and not in_shell:
      return row
  return _NONE


def worker_of(settings: WorkerSettings, environ: Mapping[str, str]) -> Worker:
  """The worker by the flags, or else by the environment; or one alone."""
  launcher = _launcher_of(environ)
  number, count = settings.worker, settings.workers
  if number is None:
    number = int(environ.get(launcher.worker, 0))
    number -= int(environ.get(launcher.first, 0))
  if count is None:
    count = int(environ.get(launcher.workers, 1))
  if settings.worker is not None and number >= count:
    raise UserError(
      f"--workers={count} --worker={number}: --worker must be 0 to "
      f"{count - 1}, or --workers larger"
    )
  # One worker needs no name: nobody else can belong to its run.
  if count == 1:
    return alone()
  names = [environ[name] for name in launcher.run if name in environ]
  # All pods of an Indexed Job have the same name but for their number.
  run = settings.run or ":".join(names).removesuffix(f"-{number}")
  if not run or (launcher is _NONE and settings.worker is None):
    raise UserError(
      f"--workers={count}: nothing tells these workers from each other, or "
      "from those of another start: give all of them the same --run and each "
      "its --worker, or start them by horovodrun --gloo, Slurm or Kubernetes"
    )
  return Worker(run, number, count, int(environ.get(launcher.local, 1)))


def run_worker(
  settings: WorkerSettings, make: Callable[[Worker], list | None], output: str
) -> None:
  """Prints the lines of make(worker); None: another worker made `output`."""
  end_on_signals()  # by an exception, so that the processes end, too
  worker = worker_of(settings, os.environ)
  lines = make(worker)
  if lines:
    print(*lines, sep="\n")
  elif not worker.number:
    console.tell(f"{output}: another worker has finished it")
