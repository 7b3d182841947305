"""What ranks need that srun starts; docker/launch_srun.sh calls it.

  python -m tools.srun_ranks node1:8,node2:8
    is the server through which ranks find each other, until its input ends. Its
    first line has its address and port, and the numbers of hosts and of ranks
  python -m tools.srun_ranks node1:8,node2:8 ADDRESS PORT -- FLAGS
    becomes the rank of this task of srun: run_pretraining.py with FLAGS

Ranks get the environment that horovodrun gives. NIC=ib0 names their network
interface (default: the one that leads to the server).
"""

import os
import socket
import sys

import psutil
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer

from common.errors import UserError, run_main


def _address_towards(host: str) -> str:
  """This machine's own address in the network that leads to `host`."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    try:
      probe.connect((host, 9))  # this sends nothing
    except socket.gaierror as e:
      raise UserError(
        f"the name {host} is not known on {socket.gethostname()} "
        f"({e.strerror}): the nodes of a job must find each other by name"
      ) from e
    return probe.getsockname()[0]


def _interface_towards(host: str) -> str:
  """The name of the network interface that leads to `host`."""
  wanted = _address_towards(host)
  for name, addresses in psutil.net_if_addrs().items():
    if any(known.address == wanted for known in addresses):
      return name
  raise UserError(
    f"no network interface has the address {wanted}: set NIC=NAME"
  )


def main(argv: list[str]) -> None:
  """Becomes a rank if there is a server, else is the server."""
  hosts, *rank = argv[1:]
  parsed = parse_hosts(hosts)
  # Horovod's description of each rank, in the order of ranks.
  slots = get_host_assignments(parsed, sum(host.slots for host in parsed))
  if rank:
    address, port, *flags = rank
    nic = os.environ.get("NIC") or _interface_towards(address)
    # srun numbers its tasks host by host, in the order of the slots.
    slot = slots[int(os.environ["SLURM_PROCID"])]
    os.environ.update(create_run_env_vars(address, [nic], port))
    os.environ.update(create_slot_env_vars(slot), PYTHONUNBUFFERED="1")
    os.execv(sys.executable, [sys.executable, "run_pretraining.py", *flags])
  server = RendezvousServer()
  port = server.start()
  server.init(slots)
  # Not this host's name, which often leads to its loopback interface.
  address = _address_towards(slots[-1].hostname)
  print(address, port, slots[-1].cross_size, slots[-1].size, flush=True)
  # The input ends with the launcher.
  sys.stdin.read()


if __name__ == "__main__":
  run_main(main, arguments=None)
