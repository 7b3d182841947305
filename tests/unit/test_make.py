"""`make env` after a failed try, and `make pretrain` with any words."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time

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

  def type(self, *words, **env):
    """make's words in a checkout of this Makefile; what is printed."""
    words = ("make", "--no-print-directory", *words)
    done = call(*words, cwd=self.folder, **env)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    return done.stdout.splitlines()

  def refused(self, python=None, **env):
    done = self.make(python, **env)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    return done.stderr


@pytest.fixture
def place(tmp_path):
  return Place(tmp_path)


def test_an_environment_is_made_once(place):
  assert place.made() == ""
  (place.packages / "tensorflow").mkdir()
  assert place.made() == ""
  assert place.times_made() == 1 and (place.packages / "tensorflow").exists()
  other = place.folder / "linked"
  place.venv.rename(other)
  place.venv.symlink_to(other)
  assert place.made() == "" and place.times_made() == 1


def test_a_wrong_python_leaves_nothing_behind(place):
  assert "is no Python that runs" in place.refused("no/such/python")
  bash = "#!/usr/bin/env bash\n"
  without = PYTHON.replace(bash, f"{bash}[[ $2 != *ensurepip* ]] || exit 1\n")
  for text, words in {
    OTHER: "is Python 3.9, and 3.11, 3.12 or 3.13 is needed",
    without: "cannot make environments",
    PYTHON.replace("ln -sf", "exit 1; ln -sf"): "-m venv failed",
  }.items():
    wrong = write(place.folder / "wrong" / "python", text)
    assert words in place.refused(wrong)
  assert not place.venv.exists()
  place.made()


@pytest.mark.parametrize("wrong", ["version", "pip", "python"])
def test_a_half_made_environment_is_made_again(place, wrong):
  """As another Python, a killed command or one without pip leaves it."""
  place.made()
  (place.packages / "tensorflow").mkdir()
  if wrong == "version":
    (place.venv / "bin" / "python").unlink()
    write(place.venv / "bin" / "python", OTHER)
  elif wrong == "pip":
    shutil.rmtree(place.packages / "pip")
  else:
    shutil.rmtree(place.venv / "bin")
  assert "it is made again" in place.made()
  assert not (place.packages / "tensorflow").exists()


def test_what_may_be_somebody_elses_is_left_alone(place):
  place.made()
  (place.venv / ".made-by-make-env").unlink()
  # make leaves this one in every environment that it has installed into.
  (place.venv / ".ready").touch()
  shutil.rmtree(place.packages / "pip")
  said = "and make env did not make it"
  assert said in place.refused() and place.packages.exists()
  shutil.move(place.venv, place.folder / "elsewhere")
  place.venv.symlink_to(place.folder / "elsewhere")
  assert said in place.refused()
  place.venv.unlink()
  place.venv.write_text("mine")
  assert said in place.refused() and place.venv.read_text() == "mine"
  # An empty folder is nobody's.
  place.venv.unlink()
  place.venv.mkdir()
  place.made()


def test_python_is_found_on_the_path(place):
  """The newest that runs and is of a version that TensorFlow has."""
  folder = place.folder / "bin"
  folder.mkdir()
  for tool in ("bash", "dirname", "mkdir", "touch", "rm"):
    os.symlink(shutil.which(tool), folder / tool)
  write(folder / "python3", OTHER)
  nothing = "no Python 3.11, 3.12 or 3.13 found"
  assert nothing in place.make("", PATH=str(folder)).stderr
  write(folder / "python3.13", "#!/usr/bin/env bash\nexit 1\n")
  write(folder / "python3.11", OTHER.replace("3.9", "3.11"))
  failed = place.make("", PATH=str(folder))
  assert "error: python3.11 -m venv failed" in failed.stderr


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
  """What a kind of environment is made of, and that a compiler comes first."""
  return [
    f"horovod check-{variant}",
    f"pip -r {variant}.txt -r horovod.txt -r text.txt -r tests.txt "
    "-c constraints.txt",
    f"horovod {variant}",
  ]


def steps_of(lines):
  """What make printed, without the time that pip's lines begin with."""
  ends = (re.sub(r"^pip  \d+:\d\d  ", "", line) for line in lines)
  return list(dict.fromkeys(filter(None, ends)))


def test_make_env_as_it_is_typed(checkout):
  """Once, for this machine; another kind only if that is asked for."""
  python = f"PYTHON={checkout.python}"
  gpu, no_gpu = (
    {"PATH": f"{checkout.folder}/{folder}:{os.environ['PATH']}"}
    for folder in ("gpu", "none")
  )
  listing = "#!/bin/sh\nfor i in 0 1 2 3; do echo GPU $i: H100; done\n"
  write(checkout.folder / "gpu" / "nvidia-smi", listing)
  write(checkout.folder / "none" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
  first = steps_of(checkout.type("env", python, **no_gpu))
  assert first[0].startswith("environment: .venv, cpu (")
  assert first[1:] == installed("cpu")
  assert checkout.type("env", python, **no_gpu) == []
  advice = "make env VARIANT=gpu replaces it"
  [told] = checkout.type("env", python, **gpu)
  assert told.endswith(advice)
  assert checkout.type("-n", "pretrain", **no_gpu)[0].startswith(
    ".venv/bin/python -m tools.quickstart"
  )
  # Packages of another kind would share files with those that are there.
  for variant in ("gpu", "cpu"):
    replaced = steps_of(
      checkout.type("env", python, f"VARIANT={variant}", **no_gpu)
    )
    assert f"packages for {variant}: it is made again" in replaced[1]
    assert replaced[2:] == installed(variant)
    assert checkout.type("env", python, **no_gpu) == []
  shutil.rmtree(checkout.venv)
  assert checkout.type("env", python, **gpu)[-1] == "horovod gpu"
  assert checkout.times_made() == 4


def test_where_horovod_does_not_build_the_rest_is_made(checkout):
  """And `make horovod` builds it when the machine has what it needs."""
  python, lacks = f"PYTHON={checkout.python}", checkout.folder / "no_compiler"
  lacks.touch()
  made = steps_of(checkout.type("env", python, "VARIANT=cpu"))
  assert made[1:] == installed("cpu")
  assert checkout.type("env", python, "VARIANT=cpu") == []
  words = ("make", "horovod", python, "VARIANT=cpu")
  assert call(*words, cwd=checkout.folder).returncode != 0
  lacks.unlink()
  assert checkout.type("horovod", python, "VARIANT=cpu") == ["horovod cpu"]


def test_tools_are_found_from_any_folder(checkout, tmp_path):
  checkout.type("env", f"PYTHON={checkout.python}", "VARIANT=cpu")
  write(checkout.folder / "records" / "__init__.py", "")
  (tmp_path / "records").mkdir()
  code = "import tools, records; print(*tools.__path__, *records.__path__)"
  done = call(str(checkout.venv / "bin" / "python"), "-c", code, cwd=tmp_path)
  assert done.stdout.split("\n")[0] == (
    f"{checkout.folder}/tools {checkout.folder}/records"
  ), done.stderr


HEADERS = "Python's headers (apt install python3.12-dev)"
COMPILER = "a C++ compiler (apt install g++)"
GIT = "git (apt install git)"
NVCC = "nvcc (CUDA_HOME names its toolkit, which needs no driver)"


@pytest.mark.parametrize(
  "variant, broken, lacks",
  [
    ("cpu", [], []),
    ("cpu", ["c++"], [COMPILER]),
    ("cpu", ["git"], [GIT]),
    ("cpu", ["Python.h"], [HEADERS]),
    ("cpu", ["c++", "Python.h", "git"], [COMPILER, HEADERS, GIT]),
    ("gpu", ["nvcc"], [NVCC]),
    ("gpu", ["git", "nvcc"], [GIT, NVCC]),
    ("gpu", [], []),
  ],
)
def test_what_horovod_needs_is_said_before_pip(
  tmp_path, variant, broken, lacks
):
  """A compiler that is there and compiles nothing is none."""
  for tool in ("bash", "dirname", "basename"):
    write(tmp_path / tool, f'#!/bin/sh\nexec {shutil.which(tool)} "$@"\n')
  for tool in {"c++", "git"}.difference(broken) | {"python"}:
    answer = f"echo {tmp_path}/python3.12" if tool == "python" else ""
    write(tmp_path / tool, f"#!/bin/sh\n{answer}\n")
  if "c++" in broken:
    write(tmp_path / "c++", "#!/bin/sh\nexit 1\n")
  for header in {"python3.12/Python.h", "include/cuda.h", "bin/nvcc"}:
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
  wanted = f"this machine lacks {', '.join(lacks)}: runs have one rank until"
  assert done.returncode == bool(lacks) and not done.stdout, done.stderr
  assert wanted in done.stderr if lacks else not done.stderr


def progress(*words):
  """The lines of tools/progress.sh, and when the first one came."""
  began = time.monotonic()
  with subprocess.Popen(
    [f"{runs.ROOT}/tools/progress.sh", "pip", *words],
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  ) as process:  # fmt: skip
    first, seconds = process.stdout.readline(), time.monotonic() - began
    rest, errors = process.communicate()
  return process.returncode, (first + rest).splitlines(), errors, seconds


def test_what_is_silent_shows_that_it_moves_and_what_failed_is_shown():
  code, lines, errors, first = progress("bash", "-c", "sleep 1; echo the end")
  assert (code, errors) == (0, "") and first < 1
  assert lines[0].strip() == "pip  0:00" and lines[-1].endswith("  the end")
  code, _, errors, _ = progress("bash", "-c", "seq 99; exit 3")
  assert code == 3 and errors.startswith("40\n41\n")
  assert errors.endswith("99\npip: it failed; its last lines are above\n")


def test_words_of_make_pretrain_arrive_as_they_are(tmp_path):
  """No shell and no make looks into them."""
  write(tmp_path / "bin" / "python", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
  (tmp_path / ".ready").touch()
  corpus, folder = """it's "a" $HOME/*.txt; `x`""", "a 'b' $(NP)"
  done = call(
    "make", "--no-print-directory", "pretrain", f"VENV={tmp_path}", "NP=3",
    f"CORPUS={corpus}", "ENCODING=$x", "LANGUAGE=fr", "MODEL=modern",
    f"OUTPUT_DIR={folder}",
  )  # fmt: skip
  assert done.stdout.splitlines() == [
    "-m", "tools.quickstart", "--num_ranks=3", f"--corpus={corpus}",
    "--encoding=$x", "--language=fr", "--model=modern",
    f"--output_dir={folder}",
  ], done.stderr  # fmt: skip


def test_make_shows_its_targets():
  """Each that people call, in 80 columns; and does nothing else."""
  make = ("make", "--no-print-directory")
  lines = call(*make).stdout.splitlines()
  assert lines == call(*make, "help").stdout.splitlines()
  with open(f"{runs.ROOT}/Makefile", encoding="utf-8") as f:
    phony = re.search(r"^\.PHONY: (.*)$", f.read(), re.M)[1].split()
  assert sorted(phony) == sorted(line.split()[1] for line in lines)
  assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("given", ["", "it's $x/a b"])
def test_make_tensorboard_takes_any_folder(given):
  words = [f"RUN={given}"] * bool(given)
  done = call(
    "make", "--no-print-directory", "-n", "-o", ".venv/.ready", "tensorboard",
    *words,
  )  # fmt: skip
  command = shlex.split(done.stdout.splitlines()[-1])
  folder = given or "runs/quickstart"
  assert command == [".build/tensorboard/bin/tensorboard", f"--logdir={folder}"]
