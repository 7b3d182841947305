"""Commands outside of the environment, and scripts of one's own."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = (
  "run_pretraining", "run_classifier", "run_squad", "run_ner", "run_embedder",
  "predict",
  "convert_checkpoint", "create_pretraining_data",
)  # fmt: skip
TOOLS = [path.stem for path in ROOT.glob("tools/[a-z]*.py")]
COMMANDS = [[f"{name}.py", "--help"] for name in SCRIPTS]
COMMANDS += [["-m", f"tools.{name}"] for name in sorted(TOOLS)]

# What google/bert's users write beside modeling.py.
OWN = """
import modeling, optimization, tokenization
import tensorflow.compat.v1 as tf

config = modeling.BertConfig(
  vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
  intermediate_size=16)
with tf.Graph().as_default(), tf.Session() as session:
  ids = tf.constant([[1, 2, 3]])
  model = modeling.BertModel(config, is_training=True, input_ids=ids)
  loss = tf.reduce_sum(model.get_pooled_output())
  train = optimization.create_optimizer(loss, 1e-3, 10, 1, False)
  session.run(tf.global_variables_initializer())
  session.run(train)
  print(session.run(model.get_pooled_output()).shape)
import sys
assert "keras" not in sys.modules  # 40% of TensorFlow's start
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
  """A Python without packages."""
  folder = tmp_path_factory.mktemp("bare")
  command = [sys.executable, "-m", "venv", "--without-pip", folder]
  subprocess.run(command, check=True)
  return folder / "bin/python"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_without_packages_a_line_says_how_to_get_them(bare, command):
  done = subprocess.run([bare, *command], cwd=ROOT, stderr=subprocess.PIPE)
  (line,) = done.stderr.decode().splitlines()
  assert done.returncode == 1
  assert ".py: error: No module named" in line
  assert "env` makes the environment" in line


@pytest.mark.parametrize("how", ["in the root", "by PYTHONPATH", "stdin"])
def test_scripts_of_ones_own_run(tmp_path, how):
  script = tmp_path / "my_script.py"
  script.write_text(OWN)
  where = {"cwd": ROOT, "env": {"PATH": "/usr/bin:/bin"}}
  if how == "in the root":  # which all tests share: it is linked
    for path in ROOT.iterdir():
      (tmp_path / path.name).symlink_to(path)
  if how == "by PYTHONPATH":
    where = {"cwd": tmp_path, "env": {"PYTHONPATH": str(ROOT)}}
  command = [sys.executable, "-" if how == "stdin" else script]
  done = subprocess.run(
    command, **where, input=OWN, capture_output=True, text=True
  )
  assert done.stdout == "(1, 16)\n", done.stderr[-2000:]
