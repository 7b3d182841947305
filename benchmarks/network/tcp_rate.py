"""How fast plain TCP is between two hosts, for allreduce.py to be held to.

  python -m benchmarks.network.tcp_rate                            on the one
  python -m benchmarks.network.tcp_rate --to=host1 --seconds=2     on the other

The second prints one JSON line. What counts is what the other host's kernel has
acknowledged, not what its process has read: on a busy machine that may be late.
"""

import json
import os
import socket
import struct
import time

from absl import flags

from common import errors

FLAGS = flags.FLAGS

PORT = 5201
WARM_UP = 0.2  # seconds, in which TCP finds its speed
CONNECT_SECONDS = 20.0

# From Linux' asm-generic/socket.h and tcp.h (`tcp_info.tcpi_bytes_acked`).
_SEND_BUFFER_FORCE, _RECEIVE_BUFFER_FORCE = 32, 33
_BYTES_ACKED = struct.Struct("120x Q")


def define_flags() -> None:
  flags.DEFINE_string("to", None, "The host to send to; default: receive.")
  flags.DEFINE_float("seconds", 1.0, "How long to send.", lower_bound=0.5)


def _enlarge(connection, option: int) -> None:
  """A buffer that lasts while this process waits for a core.

  Root only; the system's own limit is far less than what it gives by itself.
  """
  if os.geteuid() == 0:
    connection.setsockopt(socket.SOL_SOCKET, option, 2**23)


def receive() -> None:
  """Takes one connection and reads it to its end."""
  with socket.create_server(("", PORT)) as server:
    _enlarge(server, _RECEIVE_BUFFER_FORCE)
    server.settimeout(CONNECT_SECONDS)
    connection, _ = server.accept()
  buffer = bytearray(2**20)
  with connection:
    while connection.recv_into(buffer):
      pass


def send(host: str, seconds: float) -> float:
  """Sends for so long, once somebody receives there.

  Returns:
    Gbit/s of payload, after the warm-up.
  """
  with _connect(host) as connection:
    _enlarge(connection, _SEND_BUFFER_FORCE)
    began = time.perf_counter()
    _send_until(connection, began + WARM_UP)
    first, first_acked = time.perf_counter(), _acknowledged(connection)
    _send_until(connection, began + seconds)
    last, last_acked = time.perf_counter(), _acknowledged(connection)
  return (last_acked - first_acked) * 8 / (last - first) / 1e9


def _connect(host):
  give_up = time.monotonic() + CONNECT_SECONDS
  while True:
    try:
      return socket.create_connection((host, PORT), timeout=5)
    except OSError as e:
      if time.monotonic() > give_up:
        raise errors.UserError(f"--to={host}: {e}; start it there first") from e
      time.sleep(0.05)


def _send_until(connection, end):
  zeros = bytes(2**16)
  while time.perf_counter() < end:
    connection.sendall(zeros)


def _acknowledged(connection) -> int:
  """Bytes of payload that have arrived."""
  size = _BYTES_ACKED.size
  info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
  return _BYTES_ACKED.unpack(info)[0]


def main(_) -> None:
  if FLAGS.to:
    rate = send(FLAGS.to, FLAGS.seconds)
    print(json.dumps({"gbit_per_second": round(rate, 3)}), flush=True)
  else:
    receive()


if __name__ == "__main__":
  define_flags()
  errors.run_main(main)
