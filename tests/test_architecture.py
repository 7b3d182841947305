"""The import picture of ARCHITECTURE.md, held against the code."""

import ast
import functools
import operator
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = {
  name: {p.stem: p for p in sorted(ROOT.glob(f"{name}/[!_]*.py"))}
  for name in (
    "finetuning", "huggingface", "model", "pretraining_data", "serving",
    "training",
  )
}  # fmt: skip
TOP = {p.stem: p for p in sorted(ROOT.glob("*.py"))}
MODULES = functools.reduce(operator.or_, PACKAGES.values(), TOP)
ENTRY_POINTS = {
  "convert_checkpoint",
  "create_pretraining_data",
  "export_model",
  "plot_metrics",
  "predict",
  "prepare_corpus",
  "quickstart",
  "run_classifier",
  "run_pretraining",
  "run_squad",
  "train_tokenizer",
}
# Libraries that can be run, too: their `main` reads flags, nothing else does.
RUNNABLE_LIBRARIES = {"records"}
# Data workers start fast because these never load TensorFlow.
WITHOUT_TENSORFLOW = {
  "create_pretraining_data",
  "errors",
  "prepare_corpus",
  "records",
  "tokenization",
  "train_tokenizer",
  "training_plan",
  *PACKAGES["pretraining_data"],
}


def tree(name):
  return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports(name):
  """Top-level names of all imports of a module, those in functions too."""
  found = set()
  for node in ast.walk(tree(name)):
    if isinstance(node, ast.Import):
      found |= {alias.name.split(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      package, *module = node.module.split(".")
      if package in PACKAGES:
        found |= set(module) or {alias.name for alias in node.names}
      else:
        found.add(package)
  return found


def reachable(name):
  """All modules of ours that importing `name` loads."""
  stack, seen = [name], set()
  while stack:
    for other in (imports(stack.pop()) & set(MODULES)) - seen:
      seen.add(other)
      stack.append(other)
  return seen


def test_no_two_modules_have_one_name():
  assert len(MODULES) == sum(map(len, [TOP, *PACKAGES.values()]))


def test_imports_have_no_circle():
  for name in MODULES:
    assert name not in reachable(name), f"{name} imports itself in a circle"


def test_only_distributed_imports_horovod():
  assert [n for n in MODULES if "horovod" in imports(n)] == ["distributed"]


def test_only_tensorflow_v1_imports_tensorflow():
  assert [n for n in MODULES if "tensorflow" in imports(n)] == ["tensorflow_v1"]


def test_libraries_do_not_import_entry_points():
  for name in set(MODULES) - ENTRY_POINTS:
    assert not imports(name) & ENTRY_POINTS, name


def test_only_entry_points_read_flags():
  for name in set(MODULES) - ENTRY_POINTS:
    mains = ("define_flags", "main") if name in RUNNABLE_LIBRARIES else ()
    names = {
      node.id if isinstance(node, ast.Name) else node.attr
      for statement in tree(name).body
      if getattr(statement, "name", None) not in mains
      for node in ast.walk(statement)
      if isinstance(node, (ast.Name, ast.Attribute))
    }
    assert "FLAGS" not in names, name


def test_the_data_side_does_not_load_tensorflow():
  for name in WITHOUT_TENSORFLOW:
    assert "tensorflow_v1" not in reachable(name), name


def test_every_module_says_what_it_is():
  for name in MODULES:
    assert ast.get_docstring(tree(name)), name


def test_every_module_is_on_the_maps():
  for document in ("README.md", "ARCHITECTURE.md"):
    text = (ROOT / document).read_text(encoding="utf-8")
    missing = [name for name in MODULES if f"`{name}.py`" not in text]
    assert not missing, f"{document} does not mention {missing}"
