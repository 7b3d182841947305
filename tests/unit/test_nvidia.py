"""What a host tells of its GPUs and of the network between them."""

import pytest

from common import nvidia


@pytest.fixture
def adapters(tmp_path, monkeypatch):
  """The folder in which Linux lists adapters of RDMA: one has a cable."""
  monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
  for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
    port = tmp_path / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
  return str(tmp_path)


def test_nccl_takes_an_adapter_whose_library_is_there(adapters):
  line = nvidia.network_line(adapters, library="libc.so.6")
  assert line == "network between hosts: mlx5_0, by InfiniBand or RoCE"


def test_without_the_library_nccl_takes_tcp_and_says_why(adapters):
  line = nvidia.network_line(adapters, library="libmissing.so.1")
  assert line.startswith("network between hosts: TCP, not mlx5_0 (libmissing")
  assert line.endswith("install libibverbs1 and ibverbs-providers")


def test_an_adapter_that_is_switched_off_is_named(adapters, monkeypatch):
  monkeypatch.setenv("NCCL_IB_DISABLE", "1")
  line = nvidia.network_line(adapters, library="libc.so.6")
  assert line == "network between hosts: TCP, not mlx5_0 (NCCL_IB_DISABLE=1)"


def test_without_an_adapter_it_is_tcp(tmp_path):
  assert "TCP" in nvidia.network_line(str(tmp_path / "missing"))
