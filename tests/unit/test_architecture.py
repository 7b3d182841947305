"""The layers and sizes of ARCHITECTURE.md, held against the code."""

import ast
import functools
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
# From below to above: a module imports from its own layer and from lower ones.
# A name is a folder or a module of the top level.
LAYERS = (
  {"common"},
  {"text_encoders"},
  {"tokenization"},
  {"workers"},
  {"corpus"},
  {"records"},
  {"retrieval"},
  {"config"},
  {"xla_patches", "mixed_precision"},
  {"model"},
  {"modeling"},
  {"gradients"},
  {"optimization"},
  {"checkpoints"},
  {"input_pipeline"},
  {"training"},
  {"finetuning"},
  {"interop"},
  {"tools"},
  {
    "convert_checkpoint", "create_pretraining_data",
    "predict", "run_classifier", "run_embedder", "run_ner", "run_pretraining",
    "run_squad",
  },
)  # fmt: skip
# Data workers start fast because these never load TensorFlow.
WITHOUT_TENSORFLOW = {
  "create_pretraining_data", "tokenization", "tools.inspect_records",
  "tools.prepare_corpus", "tools.train_tokenizer",
  "config.training_plan",
}  # fmt: skip


def _modules():
  """{dotted name: file} of the product."""
  layers = set.union(*LAYERS)
  paths = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]
  names = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in paths
  }
  return {
    name: path
    for name, path in sorted(names.items())
    if name.split(".")[0] in layers and path.stem != "__init__"
  }


MODULES = _modules()
ENTRY_POINTS = {n for n in MODULES if n in LAYERS[-1] or n.startswith("tools.")}
DATA = {
  n
  for n in MODULES
  if n.split(".")[0]
  in ("text_encoders", "workers", "corpus", "records", "retrieval")
}


@functools.cache
def parsed(path):
  """(lines, syntax tree) of a file."""
  text = path.read_text(encoding="utf-8")
  return text.count("\n"), ast.parse(text)


def tree(name):
  return parsed(MODULES[name])[1]


@functools.cache
def imports(name):
  """Names of all imports of a module, those in functions too."""
  found = set()
  for node in ast.walk(tree(name)):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      members = {f"{node.module}.{alias.name}" for alias in node.names}
      found |= members & set(MODULES) or {node.module}
  return found


def reachable(name):
  """All modules of ours that importing `name` loads."""
  stack, seen = [name], set()
  while stack:
    for other in (imports(stack.pop()) & set(MODULES)) - seen:
      seen.add(other)
      stack.append(other)
  return seen


def layer(name):
  return next(
    i for i, names in enumerate(LAYERS) if name.split(".")[0] in names
  )


@functools.cache
def product_files():
  """Python files that git has, but for tests, benchmarks and research."""
  listed = subprocess.run(
    ["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "*.py"],
    capture_output=True,
    text=True,
    check=True,
  ).stdout.split()
  aside = ("benchmarks/", "research/", "tests/")
  ours = (name for name in listed if not name.startswith(aside))
  return [name for name in ours if (ROOT / name).exists()]


def test_all_files_have_a_layer():
  rooms = {name.split("/")[0].removesuffix(".py") for name in product_files()}
  assert rooms == set.union(*LAYERS)


def test_layers_are_those_of_the_page():
  """Its table's rows in order; a row may have several layers."""
  page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
  table = page.split("| folder | holds |\n|---|---|\n")[1].split("\n\n")[0]
  row_of = {}
  for number, row in enumerate(table.splitlines()):
    for name in re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[1]):
      row_of[name] = number
  aside = {"benchmarks", "configs", "docker", "docs", "research", "tests"}
  assert row_of.keys() - aside == set.union(*LAYERS[:-1])
  rows = [row_of[name] for names in LAYERS[:-1] for name in names]
  assert rows == sorted(rows)


def test_what_checks_flags_loads_no_tensorflow():
  """As ARCHITECTURE.md says, so that a wrong flag costs no seconds."""
  names = [name for name in MODULES if name.startswith("config.")]
  names += ["checkpoints.description", "interop.model_source"]
  names += ["interop.run_settings"]
  code = f"import sys, {', '.join(names)}\nprint('tensorflow' in sys.modules)"
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.stdout == "False\n", done.stderr


def test_imports_have_no_circle():
  for name in MODULES:
    assert name not in reachable(name), f"{name} imports itself in a circle"


def test_no_import_goes_up():
  for name in MODULES:
    others = imports(name) & set(MODULES)
    assert not {o for o in others if layer(o) > layer(name)}, name


def test_only_distributed_imports_horovod():
  """But for parts of horovodrun, which start ranks and are none."""
  names = lambda n: [i for i in imports(n) if "horovod" in i]
  found = {n: names(n) for n in MODULES if names(n)}
  launcher = found.pop("tools.srun_ranks")
  assert all(name.startswith("horovod.runner.") for name in launcher)
  assert set(found) == {"gradients.distributed"}


def test_only_tensorflow_v1_imports_tensorflow():
  packages = lambda name: {i.split(".")[0] for i in imports(name)}
  found = [name for name in MODULES if "tensorflow" in packages(name)]
  assert found == ["common.tensorflow_v1"]


def test_only_entry_points_read_flags():
  # Of the second, only whether they are parsed.
  readers = {"common.command_line", "common.tensorflow_v1", "common.settings"}
  for name in set(MODULES) - ENTRY_POINTS - readers:
    names = {
      node.id if isinstance(node, ast.Name) else node.attr
      for node in ast.walk(tree(name))
      if isinstance(node, (ast.Name, ast.Attribute))
    }
    assert "FLAGS" not in names, name


def test_the_data_side_does_not_load_tensorflow():
  for name in WITHOUT_TENSORFLOW | DATA:
    assert "common.tensorflow_v1" not in reachable(name), name


def test_every_module_says_what_it_is():
  for name in MODULES:
    assert ast.get_docstring(tree(name)), name


# Size and style ---------------------------------------------------------------

# Lines of the product, blank ones and docstrings too (2026-11-28). What adds
# lines takes others away; raise this only by what was agreed to for a feature,
# never to what is counted. Embeddings, search and several labels were to take
# 1,300 and took 3,100: the next change of size takes 1,800 away. More learning
# for the time may add 900 (34,200 + 900 = 35,100), of which Muon and the guard
# against spikes take 500, growth 230, averages 150, stable updates 150. 29,100
# is the aim.
CEILING = 35_100
# Of these lines, those that only refuse something.
GUARD_SHARE = 0.063
# Lines that are comments: reasons, which no name can give.
COMMENT_SHARE = 0.04
# For each 1,000 lines: comprehensions, lambdas and their kind, which are
# puzzles where there are more.
DENSE_IDIOMS = 20
LONGEST_FUNCTION = 60
# Words that are no name of a thing, or that the field has another one for
# (positions, indices, rotate, local).
NO_NAMES = {
  "place", "places", "turn", "turns", "near", "told", "said", "asked",
  "theirs", "ours", "alike", "found", "made", "given",
}  # fmt: skip
# A docstring says what a thing is, not what it belongs to.
NO_OPENINGS = ("Of ", "Those ", "That of ", "Whom ", "What is ", "For who ")


def lines_of(node):
  return set(range(node.lineno, node.end_lineno + 1))


def is_guard(node):
  """Whether a statement is there to refuse: it raises, or it checks."""
  if isinstance(node, ast.If):
    return isinstance(node.body[-1], ast.Raise) and not node.orelse
  if isinstance(node, ast.ExceptHandler):
    return isinstance(node.body[-1], ast.Raise)
  if isinstance(node, ast.FunctionDef):
    return bool(re.match("_?(check|problem|assert|validate)", node.name))
  return isinstance(node, (ast.Raise, ast.Assert))


def guarded_lines(module):
  return set().union(*(lines_of(n) for n in ast.walk(module) if is_guard(n)))


IDIOMS = (
  ast.GeneratorExp, ast.ListComp, ast.DictComp, ast.SetComp, ast.Lambda,
  ast.NamedExpr,
)  # fmt: skip


def is_dense(node):
  """Whether a node puts a loop or a name into an expression."""
  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
    return node.func.id in ("map", "filter")
  return isinstance(node, IDIOMS)


def name_of(node):
  """What a node defines: a function, a class, an argument or a variable."""
  if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
    return node.name
  if isinstance(node, ast.arg):
    return node.arg
  is_set = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
  return node.id if is_set else ""


@functools.cache
def nodes():
  """[(file, node of its syntax tree)] of the product."""
  return [
    (name, node)
    for name in product_files()
    for node in ast.walk(parsed(ROOT / name)[1])
  ]


@functools.cache
def lines():
  """The number of lines of the product."""
  return sum(parsed(ROOT / name)[0] for name in product_files())


def test_the_product_stays_under_its_ceiling():
  assert lines() <= CEILING


def test_little_of_it_only_refuses():
  guards = sum(
    len(guarded_lines(parsed(ROOT / name)[1])) for name in product_files()
  )
  assert guards <= GUARD_SHARE * lines()


def test_comments_give_reasons():
  comments = 0
  for name in product_files():
    text = (ROOT / name).read_text(encoding="utf-8")
    comments += len(re.findall(r"^\s*#", text, re.M))
  assert comments >= COMMENT_SHARE * lines()


def test_functions_fit_on_a_screen():
  for file, node in nodes():
    if isinstance(node, ast.FunctionDef):
      assert len(lines_of(node)) <= LONGEST_FUNCTION, f"{file}:{node.name}"


def test_expressions_are_plain():
  dense = sum(is_dense(node) for _, node in nodes())
  assert dense <= DENSE_IDIOMS / 1000 * lines()


def test_names_are_nouns_of_the_field():
  for file, node in nodes():
    name = name_of(node).replace("near_duplicates", "duplicates")
    assert not NO_NAMES & set(name.split("_")), (file, name)


def test_docstrings_say_what_a_thing_is():
  kinds = ast.FunctionDef, ast.ClassDef, ast.Module
  for file, node in nodes():
    if isinstance(node, kinds):
      text = ast.get_docstring(node) or ""
      assert not text.startswith(NO_OPENINGS), (file, text)
