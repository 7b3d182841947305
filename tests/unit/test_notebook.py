"""docs/quickstart.ipynb runs from its first cell to its last.

`test_docs.py` checks the flags of its commands, and the quickstart in
`tests/ranks` goes the same way.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import runs

ROOT = pathlib.Path(runs.ROOT)
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


def program(cells):
  """Python of the code cells: what follows `!` is a command for a shell."""

  def as_python(command):
    line = "set -e; " + command[1]
    return f"run(['bash', '-c', {line!r}], check=True)"

  lines = ["import sys; sys.path.append('cells')"]
  lines.append("from subprocess import run")
  for cell in cells:
    if cell["cell_type"] == "code":
      text = "".join(cell["source"])
      assert not re.search(r"^%", text, re.M)
      command = re.compile(r"^!((?:.*\\\n)*.*)$", re.M)
      lines.append(command.sub(as_python, text))
  return "\n".join(lines)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
  notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
  assert notebook["nbformat"] == 4
  assert not any(cell.get("outputs") for cell in notebook["cells"])
  for path in ROOT.iterdir():
    if path.name not in ("runs", ".build", ".git"):
      (tmp_path / path.name).symlink_to(path)
  # Jupyter's own package is there for the cells only.
  (tmp_path / "cells/IPython").mkdir(parents=True)
  display = tmp_path / "cells/IPython/display.py"
  display.write_text("def Image(path): print(open(path))")
  (tmp_path / "program.py").write_text(program(notebook["cells"]))
  environment = {
    **os.environ,
    "PATH": f"{runs.BIN}:{os.environ['PATH']}",
    # Jupyter's, of a package that it alone has.
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
  }
  done = subprocess.run(
    [sys.executable, "program.py"], cwd=tmp_path, env=environment,
    capture_output=True, text=True, timeout=runs.HANG_SECONDS,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  made = tmp_path / "runs" / "notebook"
  assert (made / "hugging_face" / "README.md").exists()
  assert (made / "curve.png").read_bytes().startswith(b"\x89PNG")
  for text, word in (
    ("the cow eats [MASK] every day .", "grass"),
    ("there is a grey whale in the [MASK] .", "ocean"),
  ):
    assert f"{text}\n  [MASK]  {word} " in done.stdout
  assert "name='runs/notebook/curve.png'" in done.stdout
  assert "would never be used" not in done.stderr
  # It learned more than how often each word occurs.
  results = json.loads((made / "pretrain" / "eval_results.json").read_text())
  manifest = json.loads((made / "records" / "train.manifest.json").read_text())
  entropy = manifest["counts"]["unigram_entropy"]
  assert results["masked_lm_loss"] < 0.7 * entropy
