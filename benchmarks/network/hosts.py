"""Hosts on one machine, each with an address, an sshd and a cable of some rate.

  sudo .venv/bin/python -m benchmarks.network.hosts --hosts=2 --gbit=1 -- \\
    .venv/bin/horovodrun -np 2 -H host1:1,host2:1 --disable-cache \\
    .venv/bin/python -m benchmarks.network.allreduce

The command runs on host1, with this environment and in this folder; its exit
status is this one's. `ssh host2` needs nothing more there. In Python:

  with hosts.Testbed(count=2, gbit=1.0) as bed:
    bed.run(["ssh", "host2", "hostname"])
    bed.link("host2", up=False)

A host is a set of namespaces: network, mounts, host name and processes. Files
are the machine's, as if all were on a file system that hosts share, but for
/etc/ssh, /etc/hosts, /run and ~/.ssh. Its eth0 is a cable to a switch, a
namespace with a bridge, and carries `gbit` each way; from there nothing leads
out. Cables have no latency; cores and memory are the machine's, too.

Nothing has a name or a file on the machine, so test beds do not see each other,
and nothing is left behind: the first process of a host ends when its standard
input does, however this process ends, and the kernel ends all others with it.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
from absl import flags

from benchmarks import measuring
from common import errors

FLAGS = flags.FLAGS

NIC = "eth0"  # Horovod wants one name on all hosts
START_SECONDS = 20
MTU = 9000  # as in clusters, and fewer packets for the machine's cores

# What a token bucket lets through at once: a packet before it is cut into
# segments (64 KiB) at least, and what is due in a millisecond, for a timer may
# be so late. What it holds back: so much that TCP fills the wire.
BURST_BYTES, BURST_SECONDS = 2**17, 1e-3
QUEUE_SECONDS = 0.02

PROGRAMS = "unshare nsenter mount ip tc ssh ssh-keygen sshd".split()
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # not in all users'
_NAMESPACES = ("--mount", "--net", "--uts", "--ipc", "--pid")

# The first process of a host. sshd lets nobody in whose password is locked, as
# root's often is, so there it is not.
_FIRST_PROCESS = """
set -e
read -r pid _ </proc/self/stat # as the machine numbers it
mount -t proc proc /proc
for folder in /run /etc/ssh ~root/.ssh; do
  [ ! -d $folder ] || mount -t tmpfs -o mode=755 tmpfs $folder
done
mkdir /run/sshd
echo "$1" >/proc/sys/kernel/hostname
echo "$2" >/run/hosts
echo 'root:*:::::::' >/run/shadow
chmod 600 /run/shadow
mount --bind /run/hosts /etc/hosts
mount --bind /run/shadow /etc/shadow
ip link set lo up
echo "$pid"
read -r _
"""

_SSH_CONFIG = """
Host *
  IdentityFile /etc/ssh/id
  IdentitiesOnly yes
  IdentityAgent none
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  GlobalKnownHostsFile /dev/null
  LogLevel ERROR
"""
_SSHD_CONFIG = """
HostKey /etc/ssh/id
AuthorizedKeysFile /etc/ssh/id.pub
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
UseDNS no
MaxStartups 100
"""

# Plain TCP: the receiver reads to the end, the sender prints Gbit/s.
_RECEIVE = """
import socket
with socket.create_server(("", 5201)) as server:
  server.settimeout(20)
  connection, _ = server.accept()
  while connection.recv(2**20):
    pass
"""
_SEND = """
import socket, sys, time
give_up = time.monotonic() + 20
while True:
  try:
    connection = socket.create_connection((sys.argv[1], 5201), timeout=20)
    break
  except OSError:
    if time.monotonic() > give_up:
      raise
    time.sleep(0.05)
zeros, sent, began = bytes(2**16), 0, time.perf_counter()
while time.perf_counter() < began + float(sys.argv[2]):
  connection.sendall(zeros)
  sent += len(zeros)
connection.shutdown(socket.SHUT_WR)
connection.recv(1)  # returns when the receiver has closed it
print(sent * 8 / (time.perf_counter() - began) / 1e9)
"""


def _call(*command: str) -> None:
  """Runs a command of the system; raises `UserError` with its message."""
  process = subprocess.run(
    command,
    env={**os.environ, "PATH": _PATH},
    capture_output=True,
    text=True,
    timeout=START_SECONDS,
  )
  if process.returncode:
    raise errors.UserError(f"{' '.join(command)}: {process.stderr.strip()}")


class Command(subprocess.Popen):
  """A command on a host. Signals reach it, not nsenter, which keeps them."""

  def send_signal(self, number: int) -> None:
    for _ in range(100):
      if self.poll() is not None:
        return
      with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(self.pid).children():
          child.send_signal(number)
          return
      time.sleep(0.02)  # nsenter has not begun it yet, or is about to end


class _Node:
  """A host or the switch: namespaces, and their first process."""

  def __init__(self, name: str, hosts_file: str):
    self.name = name
    self._first = subprocess.Popen(
      [
        *("unshare", *_NAMESPACES, "--fork", "--kill-child"),
        *("bash", "-c", _FIRST_PROCESS, "bash", name, hosts_file),
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env={**os.environ, "PATH": _PATH},
      start_new_session=True,  # Ctrl-C is for the command
    )
    self.pid = self._first.stdout.readline().strip()
    if not self.pid:
      _, message = self._first.communicate()
      raise errors.UserError(f"{name} cannot be made here: {message.strip()}")

  def enter(self, *namespaces: str) -> list[str]:
    """The beginning of a command there, or in some of its namespaces."""
    wanted = namespaces or _NAMESPACES
    return ["nsenter", f"--target={self.pid}", *wanted, "--"]

  def ip(self, *words: str) -> None:
    _call(*self.enter("--net"), "ip", *words)

  def write(self, path: str, text: str, mode: int = 0o644) -> None:
    """Writes a file there, in one of the folders that are its own."""
    path = f"/proc/{self.pid}/root{path}"
    with open(os.open(path, os.O_CREAT | os.O_WRONLY, mode), "w") as f:
      f.write(text)

  def set_rate(self, device: str, gbit: float | None) -> None:
    """Limits what leaves by `device`."""
    change = *self.enter("--net"), "tc", "qdisc", "replace", "dev", device
    if gbit is None:
      _call(*change, "root", "noqueue")
      return
    bytes_per_second = gbit * 1e9 / 8
    burst = int(max(BURST_BYTES, BURST_SECONDS * bytes_per_second))
    queue = int(burst + QUEUE_SECONDS * bytes_per_second)
    limits = "burst", str(burst), "limit", str(queue)
    _call(*change, "root", "tbf", "rate", f"{gbit * 1e9:.0f}bit", *limits)

  def close(self) -> None:
    """Ends all processes there; the kernel then takes the rest away."""
    for pipe in (self._first.stdin, self._first.stdout, self._first.stderr):
      pipe.close()
    try:
      self._first.wait(timeout=START_SECONDS)
    except subprocess.TimeoutExpired:
      self._first.kill()  # --kill-child: the host's first process, too
      self._first.wait()


class Testbed:
  """Hosts with ssh between them. Use it as a context manager.

  Attributes:
    names: of the hosts: host1, host2, ...
  """

  def __init__(self, count: int = 2, gbit: float | None = None):
    """Makes `count` of them, with cables as `set_rate` has it, or UserError."""
    lacking = [name for name in PROGRAMS if not shutil.which(name, path=_PATH)]
    if os.geteuid() != 0 or lacking:
      raise errors.UserError(
        "hosts are namespaces, which need root, iproute2 and openssh-server: "
        f"user {os.geteuid()}; missing: {', '.join(lacking) or 'nothing'}"
      )
    self.names = tuple(f"host{i + 1}" for i in range(count))
    self._nodes: dict[str, _Node] = {}
    try:
      self._make(gbit)
    except BaseException:
      self.close()
      raise

  def _make(self, gbit):
    addresses = {name: f"10.0.0.{i + 1}" for i, name in enumerate(self.names)}
    lines = [f"{address} {name}" for name, address in addresses.items()]
    hosts_file = "\n".join(["127.0.0.1 localhost", *lines])
    for name in ("switch", *self.names):
      self._nodes[name] = _Node(name, hosts_file)
    self._switch = self._nodes["switch"]
    self._switch.ip("link", "add", "bridge", "type", "bridge")
    self._switch.ip("link", "set", "bridge", "mtu", str(MTU), "up")
    for name, address in addresses.items():
      self._connect(name, address)
    self.set_rate(gbit)
    with tempfile.TemporaryDirectory() as folder:
      key = pathlib.Path(folder, "id")
      _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
      private, public = key.read_text(), key.with_suffix(".pub").read_text()
    for name in self.names:
      self._start_sshd(name, private, public)
    for name in self.names:
      self._wait_for_ssh(name)

  def _connect(self, name, address):
    """A cable: eth0 there, and at the switch a port with the host's name."""
    host = self._nodes[name]
    self._switch.ip(
      *("link", "add", name, "mtu", str(MTU), "type", "veth", "peer"),
      *("name", NIC, "mtu", str(MTU), "netns", host.pid),
    )
    self._switch.ip("link", "set", name, "master", "bridge", "up")
    host.ip("address", "add", f"{address}/24", "dev", NIC)
    host.ip("link", "set", NIC, "up")

  def _start_sshd(self, name, private, public):
    host = self._nodes[name]
    host.write("/etc/ssh/id", private, mode=0o600)
    host.write("/etc/ssh/id.pub", public)
    host.write("/etc/ssh/ssh_config", _SSH_CONFIG)
    host.write("/etc/ssh/sshd_config", _SSHD_CONFIG)
    sshd = shutil.which("sshd", path=_PATH)  # it wants its whole path
    _call(*host.enter(), sshd, "-f", "/etc/ssh/sshd_config")

  def _wait_for_ssh(self, name):
    give_up = time.monotonic() + START_SECONDS
    while True:
      process = self.run(["ssh", "-oBatchMode=yes", name, "true"])
      if process.returncode == 0:
        return
      if time.monotonic() > give_up:
        raise errors.UserError(f"ssh {name}: {process.stderr.strip()}")
      time.sleep(0.05)

  def popen(self, command, host: str | None = None, **settings) -> Command:
    """Starts a command on `host` (default: the first), by Popen's settings.

    It has this process' environment and folder, but no terminal.
    """
    folder = settings.pop("cwd", os.getcwd())
    enter = self._nodes[host or self.names[0]].enter()
    return Command(
      [*enter, "env", f"--chdir={folder}", *command],
      start_new_session=True,
      **settings,
    )

  def run(self, command, host=None, timeout: float = 60.0, **settings):
    """As `subprocess.run`, on `host`; what it prints is kept, as text."""
    pipe = subprocess.PIPE
    pipes = dict(stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    with self.popen(command, host, **{**pipes, **settings}) as process:
      try:
        output = process.communicate(timeout=timeout)
      except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(command, process.returncode, *output)

  def set_rate(self, gbit: float | None) -> None:
    """Gbit/s of all cables from now on, each way; None: as fast as can be."""
    for name in self.names:
      self._nodes[name].set_rate(NIC, gbit)
      self._switch.set_rate(name, gbit)

  def link(self, host: str, up: bool) -> None:
    """Plugs a host's cable in or out, at the switch."""
    self._switch.ip("link", "set", host, "up" if up else "down")

  def measure(self, seconds: float = 1.0) -> float:
    """Gbit/s of plain TCP's payload from the last host to the first."""
    with self.popen([sys.executable, "-c", _RECEIVE]):
      send = [sys.executable, "-c", _SEND, self.names[0], str(seconds)]
      sent = self.run(send, self.names[-1])
    return round(float(sent.stdout), 3)

  def close(self) -> None:
    """Ends all that runs on the hosts, and them."""
    while self._nodes:
      _, node = self._nodes.popitem()
      node.close()

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()


def main(argv) -> None:
  for number in (signal.SIGTERM, signal.SIGINT):
    # The end of this program ends the test bed with all that runs on it.
    signal.signal(number, lambda number, _: sys.exit(128 + number))
  with Testbed(FLAGS.hosts, FLAGS.gbit) as bed:
    asked = "no limit" if FLAGS.gbit is None else f"{FLAGS.gbit:g} Gbit/s"
    measuring.tell(
      f"hosts: {', '.join(bed.names)}; cables: {asked} asked, "
      f"{bed.measure():.3g} Gbit/s measured by plain TCP"
    )
    status = bed.popen(argv[1:]).wait()
  sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
  flags.DEFINE_integer("hosts", 2, "How many.", lower_bound=2, upper_bound=200)
  flags.DEFINE_float(
    "gbit",
    None,
    "Gbit/s of each host's cable, each way; default: as fast as can be.",
    lower_bound=0.001,
  )
  errors.run_main(main, None)
