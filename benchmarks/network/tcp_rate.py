"""How fast plain TCP is between two hosts, for allreduce.py to be held to.

  python -m benchmarks.network.tcp_rate              on the one
  python -m benchmarks.network.tcp_rate host1 2.0    on the other, for 2 seconds

The second prints Gbit/s of payload, until the first has read all of it.
"""

import socket
import sys
import time

PORT = 5201
CONNECT_SECONDS = 20.0


def receive() -> None:
  """Takes one connection and reads it to its end."""
  with socket.create_server(("", PORT)) as server:
    server.settimeout(CONNECT_SECONDS)
    connection, _ = server.accept()
  with connection:
    while connection.recv(2**20):
      pass


def send(host: str, seconds: float) -> float:
  """Sends for so long, once somebody receives there; Gbit/s."""
  zeros, sent = bytes(2**16), 0
  with _connect(host) as connection:
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
      connection.sendall(zeros)
      sent += len(zeros)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # returns when the other side has closed it
    return sent * 8 / (time.perf_counter() - began) / 1e9


def _connect(host: str) -> socket.socket:
  give_up = time.monotonic() + CONNECT_SECONDS
  while True:
    try:
      return socket.create_connection((host, PORT), timeout=CONNECT_SECONDS)
    except OSError:
      if time.monotonic() > give_up:
        raise
      time.sleep(0.05)


if __name__ == "__main__":
  if len(sys.argv) == 1:
    receive()
  else:
    print(send(sys.argv[1], float(sys.argv[2])))
