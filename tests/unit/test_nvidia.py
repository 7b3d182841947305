"""What a host tells of its GPUs and of the network between them."""

import re
import types

import pytest

from common import nvidia


@pytest.mark.parametrize(
  "library, disabled, line",
  [
    ("libc.so.6", "", "mlx5_0, by InfiniBand or RoCE"),
    (
      "libmissing.so.1", "",
      r"TCP, not mlx5_0 \(libmissing.* install libibverbs1 and .*-providers",
    ),
    ("libc.so.6", "1", r"TCP, not mlx5_0 \(NCCL_IB_DISABLE=1\)"),
  ],
)  # fmt: skip
def test_nccl_takes_an_adapter_whose_library_is_there(
  tmp_path, monkeypatch, library, disabled, line
):
  """Linux lists two adapters of RDMA, of which one has a cable."""
  monkeypatch.setenv("NCCL_IB_DISABLE", disabled)
  for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
    port = tmp_path / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
  found = nvidia.network_line(str(tmp_path), library=library)
  assert re.fullmatch(f"network between hosts: {line}", found)
  assert "TCP" in nvidia.network_line(str(tmp_path / "missing"))


def test_only_visible_gpus_are_asked_for(monkeypatch):
  asked = []
  listed = types.SimpleNamespace(stdout="8.0\n9.0\n")
  monkeypatch.setattr(
    nvidia.subprocess, "run", lambda words, **_: asked.append(words) or listed
  )
  for visible, words in ((None, []), ("1,3", ["--id=1,3"]), ("", None)):
    if visible is not None:
      monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    else:
      monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = nvidia.visible_gpus("compute_cap")
    assert found == ([] if words is None else ["8.0", "9.0"])
    ids = [w for call in asked for w in call if w.startswith("--id")]
    assert ids == (words or []) and len(asked) == (words is not None)
    asked.clear()
