"""`make env` after a failed try, and `make pretrain` with any words."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import runs

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
# A Python whose environments are made at once: with pip, an empty package.
PYTHON = f"""#!/usr/bin/env bash
[ "$1 $2" = "-m venv" ] || exec {sys.executable} "$@"
echo made >>"$(dirname "$0")/made"
mkdir -p "$3/bin" "$3/lib/python{HERE}/site-packages/pip"
ln -sf {os.path.realpath(sys.executable)} "$3/bin/python"
echo 'include-system-site-packages = false' >"$3/pyvenv.cfg"
touch "$3/lib/python{HERE}/site-packages/pip/__init__.py"
"""
OTHER = """#!/usr/bin/env bash
[ "$1" = -c ] && echo 3.9
"""
MAKE = ("make", "--no-print-directory")


def write(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  path.chmod(0o755)
  return str(path)


def call(*words, cwd=runs.ROOT, **env):
  """A command with more in its environment, and its output as text."""
  return subprocess.run(
    words, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
  )


class Place:
  """A folder with a space in its name, a Python, and where a venv may be."""

  def __init__(self, folder):
    self.folder = folder / "a checkout"
    self.venv = self.folder / ".venv"
    self.python = write(self.folder / "my python" / "python", PYTHON)
    self.packages = self.venv / "lib" / f"python{HERE}" / "site-packages"

  def times_made(self):
    made = self.folder / "my python" / "made"
    return made.read_text().count("made") if made.exists() else 0

  def make(self, python=None, **env):
    script = f"{runs.ROOT}/tools/make_venv.sh"
    python = self.python if python is None else python
    return call(script, python, ".venv", "cpu", cwd=self.folder, **env)

  def made(self):
    done = self.make()
    assert done.returncode == 0, done.stderr
    usable = [self.venv / "bin" / "python", "-c", "import pip"]
    assert subprocess.run(usable).returncode == 0
    return done.stdout

  def refused(self, *python, **env):
    done = self.make(*python, **env)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    return done.stderr

  def type(self, *words, **env):
    """make's words in a checkout of this Makefile; what is printed."""
    done = call(*MAKE, *words, cwd=self.folder, **env)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    # pip's lines begin with a time.
    ends = (
      re.sub(r"^pip  \d+:\d\d  ", "", x) for x in done.stdout.splitlines()
    )
    return list(dict.fromkeys(filter(None, ends)))


@pytest.fixture
def place(tmp_path):
  return Place(tmp_path)


def test_an_environment_is_made_once_and_again_if_it_is_half_made(place):
  """As another Python, a killed command or one without pip leaves it."""
  assert place.made() == ""
  (place.packages / "tensorflow").mkdir()
  assert place.made() == ""
  assert place.times_made() == 1 and (place.packages / "tensorflow").exists()
  for wrong in ("version", "pip", "python"):
    (place.packages / "tensorflow").mkdir(exist_ok=True)
    if wrong == "version":
      (place.venv / "bin" / "python").unlink()
      write(place.venv / "bin" / "python", OTHER)
    else:
      half = {"pip": place.packages / "pip", "python": place.venv / "bin"}
      shutil.rmtree(half[wrong])
    assert "it is made again" in place.made()
    assert not (place.packages / "tensorflow").exists()


def test_python_is_one_that_runs_and_can_make_environments(place):
  """The newest on the path of a version that TensorFlow has."""
  for text, words in {
    OTHER: "is Python 3.9, and 3.11, 3.12 or 3.13 is needed",
    PYTHON.replace("ln -sf", "exit 1; ln -sf"): "-m venv failed",
  }.items():
    wrong = write(place.folder / "wrong" / "python", text)
    assert words in place.refused(wrong)
  assert not place.venv.exists()
  folder = place.folder / "bin"
  for tool in ("bash", "dirname", "mkdir", "touch", "rm"):
    write(folder / tool, f'#!/bin/sh\nexec {shutil.which(tool)} "$@"\n')
  write(folder / "python3", OTHER)
  write(folder / "python3.13", "#!/usr/bin/env bash\nexit 1\n")
  write(folder / "python3.11", OTHER.replace("3.9", "3.11"))
  failed = place.make("", PATH=str(folder))
  assert "error: python3.11 -m venv failed" in failed.stderr


def test_what_may_be_somebody_elses_is_left_alone(place):
  place.made()
  elsewhere = place.folder / "elsewhere"
  place.venv.rename(elsewhere)
  place.venv.symlink_to(elsewhere)
  assert place.made() == "" and place.times_made() == 1
  (place.venv / ".made-by-make-env").unlink()
  # make leaves this one in every environment that it has installed into.
  (place.venv / ".ready").touch()
  shutil.rmtree(place.packages / "pip")
  refusal = "and make env did not make it"
  assert refusal in place.refused() and place.packages.exists()
  place.venv.unlink()
  place.venv.write_text("mine")
  assert refusal in place.refused() and place.venv.read_text() == "mine"
  # An empty folder is nobody's.
  place.venv.unlink()
  place.venv.mkdir()
  place.made()


@pytest.fixture
def checkout(place):
  """The Makefile with its scripts; pip and Horovod's build only say so."""
  for name in ("Makefile", "requirements.txt"):
    shutil.copy(f"{runs.ROOT}/{name}", place.folder)
  for name in ("tools", "requirements", "xla_patches"):
    shutil.copytree(f"{runs.ROOT}/{name}", place.folder / name)
  write(
    place.folder / "xla_patches" / "build_horovod.sh",
    '#!/usr/bin/env bash\necho "horovod $1"\n[ ! -e no_compiler ]\n',
  )
  write(
    place.folder / "my python" / "installs",
    r"""#!/usr/bin/env bash
[ "$1 $2 $3" = "-m pip install" ] || exec "$(dirname "$0")/real" "$@"
words="${*:4}"
echo "pip ${words//requirements\//}"
case $5 in *cpu*) name=tensorflow_cpu ;; *) name=tensorflow ;; esac
cd "$(dirname "$0")"/../lib/python*/site-packages
mkdir $name-2.21.0.dist-info
""",
  )
  write(
    place.folder / "my python" / "python",
    PYTHON
    + """
mv "$3/bin/python" "$3/bin/real"
cp "$(dirname "$0")/installs" "$3/bin/python"
""",
  )
  return place


def installed(variant):
  """What a kind of environment is made of; the compiler is looked for first."""
  lists = f"{variant} horovod text search tests".split()
  files = " ".join(f"-r {name}.txt" for name in lists)
  check = f"horovod check-{variant}"
  return [check, f"pip {files} -c constraints.txt", f"horovod {variant}"]


def test_make_env_as_it_is_typed(checkout):
  """Once, for this machine; another kind only if that is asked for."""
  python = f"PYTHON={checkout.python}"
  gpu, no_gpu = (
    {"PATH": f"{checkout.folder}/{folder}:{os.environ['PATH']}"}
    for folder in ("gpu", "none")
  )
  write(checkout.folder / "gpu/nvidia-smi", "#!/bin/sh\necho GPU 0: H100\n")
  write(checkout.folder / "none" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
  first = checkout.type("env", python, **no_gpu)
  assert first[0].startswith("environment: .venv, cpu (")
  assert first[1:] == installed("cpu")
  assert checkout.type("env", python, **no_gpu) == []
  [advice] = checkout.type("env", python, **gpu)
  assert advice.endswith("make env VARIANT=gpu replaces it")
  # Packages of another kind would share files with those that are there.
  for variant in ("gpu", "cpu"):
    replaced = checkout.type("env", python, f"VARIANT={variant}", **no_gpu)
    assert f"packages for {variant}: it is made again" in replaced[1]
    assert replaced[2:] == installed(variant)
    assert checkout.type("env", python, **no_gpu) == []
  shutil.rmtree(checkout.venv)
  assert checkout.type("env", python, **gpu)[-1] == "horovod gpu"
  assert checkout.times_made() == 4


def test_where_horovod_does_not_build_the_rest_is_made(checkout, tmp_path):
  """`make horovod` builds it later. Tools are found from any folder."""
  python, lacks = f"PYTHON={checkout.python}", checkout.folder / "no_compiler"
  lacks.touch()
  made = checkout.type("env", python, "VARIANT=cpu")
  assert made[1:] == installed("cpu")
  assert checkout.type("env", python, "VARIANT=cpu") == []
  words = ("make", "horovod", python, "VARIANT=cpu")
  assert call(*words, cwd=checkout.folder).returncode != 0
  lacks.unlink()
  assert checkout.type("horovod", python, "VARIANT=cpu") == ["horovod cpu"]
  code = (
    "from importlib.util import find_spec as f; "
    "print(*f('tools').submodule_search_locations)"
  )
  done = call(str(checkout.venv / "bin" / "python"), "-c", code, cwd=tmp_path)
  assert done.stdout == f"{checkout.folder}/tools\n", done.stderr


@pytest.mark.parametrize(
  "variant, broken",
  [
    ("cpu", {}),
    (
      "cpu",
      {
        "c++": "a C++ compiler (apt install g++)",
        "Python.h": "Python's headers (apt install python3.12-dev)",
        "git": "git (apt install git)",
      },
    ),
    (
      "gpu",
      {"nvcc": "nvcc (CUDA_HOME names its toolkit, which needs no driver)"},
    ),
    ("gpu", {}),
  ],
)
def test_what_horovod_needs_is_said_before_pip(tmp_path, variant, broken):
  """A compiler that is there and compiles nothing is none."""
  for tool in ("bash", "dirname", "basename"):
    write(tmp_path / tool, f'#!/bin/sh\nexec {shutil.which(tool)} "$@"\n')
  for tool in {"c++", "git"}.difference(broken):
    write(tmp_path / tool, "#!/bin/sh\n")
  write(tmp_path / "python", f"#!/bin/sh\necho {tmp_path}/python3.12\n")
  if "c++" in broken:
    write(tmp_path / "c++", "#!/bin/sh\nexit 1\n")
  for header in ("python3.12/Python.h", "include/cuda.h", "bin/nvcc"):
    if os.path.basename(header) not in broken:
      write(tmp_path / header, "")
  script = f"{runs.ROOT}/xla_patches/build_horovod.sh"
  # /usr/local/cuda is where a toolkit is looked for last.
  text = open(script).read().replace("/usr/local/cuda", f"{tmp_path}/none")
  done = call(
    write(tmp_path / "xla_patches" / "build.sh", text),
    f"check-{variant}", f"{tmp_path}/python",
    PATH=str(tmp_path), CUDA_HOME=str(tmp_path),
  )  # fmt: skip
  lacks = f"this machine lacks {', '.join(broken.values())}: runs have one rank"
  assert done.returncode == bool(broken) and not done.stdout, done.stderr
  assert lacks in done.stderr if broken else not done.stderr


def test_words_of_make_arrive_as_they_are(tmp_path):
  """No shell and no make looks into them."""
  write(tmp_path / "bin" / "python", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
  (tmp_path / ".ready").touch()
  corpus, folder = """it's "a" $HOME/*.txt; `x`""", "a 'b' $(NP)"
  done = call(
    *MAKE, "pretrain", f"VENV={tmp_path}", "NP=3", f"CORPUS={corpus}",
    "ENCODING=$x", "LANGUAGE=fr", "MODEL=modern", f"OUTPUT_DIR={folder}",
  )  # fmt: skip
  assert done.stdout.splitlines() == [
    "-m", "tools.quickstart", "--num_ranks=3", f"--corpus={corpus}",
    "--encoding=$x", "--language=fr", "--model=modern",
    f"--output_dir={folder}",
  ], done.stderr  # fmt: skip
  dry = (*MAKE, "-n", "-o", ".venv/.ready", "tensorboard")
  for given, folder in (
    ([], "runs/quickstart"), (["RUN=it's $x/a b"], "it's $x/a b")
  ):  # fmt: skip
    command = shlex.split(call(*dry, *given).stdout.splitlines()[-1])
    assert command[0] == ".build/tensorboard/bin/tensorboard"
    assert command[1:] == [f"--logdir={folder}"]


def test_a_small_text_is_searched(tmp_path):
  """It has fewer articles than an update of the embedder; one line is none."""
  articles = [f'A "name" {n}.\nIt is.' for n in range(3)] + ["Alone."]
  root = tmp_path / "runs of mine"
  for part in ("train", "heldout"):
    write(root / "corpus" / f"{part}.txt", "\n\n".join(articles) + "\n")
  write(root / "pretrain" / "checkpoint", "")
  write(tmp_path / ".venv/bin/python", '#!/bin/sh\necho "$@" >>calls\n')
  script = f"{runs.ROOT}/tools/search_own_text.sh"
  assert not call(script, str(root), "who?", cwd=tmp_path).returncode
  calls = (tmp_path / "calls").read_text()
  assert "--train_batch_size=3 " in calls and "--query=who?" in calls
  lines = (root / "search" / "corpus.jsonl").read_text().splitlines()
  names = [json.loads(line)["_id"] for line in lines]
  assert names == [f"{p} {n}" for p in ("heldout", "train") for n in (1, 2, 3)]
  assert len((root / "search/qrels/test.tsv").read_text().splitlines()) == 4
