"""`make env` after a failed try, and `make pretrain` with any words."""

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
  wrong = write(place.folder / "wrong", OTHER)
  assert "is Python 3.9, and 3.11, 3.12 or 3.13 is needed" in place.refused(
    wrong
  )
  assert "is no Python that runs" in place.refused("no/such/python")
  without = PYTHON.replace(
    "#!/usr/bin/env bash",
    "#!/usr/bin/env bash\n[[ $2 != *ensurepip* ]] || exit 1",
  )
  without = write(place.folder / "without", without)
  assert "cannot make environments" in place.refused(without)
  fails = PYTHON.replace("ln -sf", "exit 1; ln -sf")
  fails = write(place.folder / "fails" / "python", fails)
  assert "-m venv failed" in place.refused(fails)
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
  for name in ("tools", "requirements"):
    shutil.copytree(f"{runs.ROOT}/{name}", place.folder / name)
  write(
    place.folder / "xla_patches" / "build_horovod.sh",
    '#!/usr/bin/env bash\necho "horovod $1"\n',
  )
  write(
    place.folder / "my python" / "installs",
    """#!/usr/bin/env bash
[ "$1 $2 $3" = "-m pip install" ] || exec "$(dirname "$0")/real" "$@"
echo "pip $6"
case $6 in *cpu*) name=tensorflow_cpu ;; *) name=tensorflow ;; esac
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
  first = checkout.type("env", python, **no_gpu)
  assert re.fullmatch(
    r"environment: .venv with Python \S+, cpu \(about 3 minutes\)", first[0]
  )
  assert first[1:] == ["pip requirements/cpu.txt", "horovod cpu"]
  assert checkout.type("env", python, **no_gpu) == []
  advice = "make env VARIANT=gpu replaces it"
  [told] = checkout.type("env", python, **gpu)
  assert told.endswith(advice)
  assert checkout.type("-n", "pretrain", **no_gpu)[0].startswith(
    ".venv/bin/python -m tools.quickstart"
  )
  # Packages of another kind would share files with those that are there.
  for variant in ("gpu", "cpu"):
    replaced = checkout.type("env", python, f"VARIANT={variant}", **no_gpu)
    assert f"packages for {variant}: it is made again" in replaced[0]
    assert replaced[2:] == [
      f"pip requirements/{variant}.txt",
      f"horovod {variant}",
    ]
    assert checkout.type("env", python, **no_gpu) == []
  shutil.rmtree(checkout.venv)
  assert checkout.type("env", python, **gpu)[-1] == "horovod gpu"
  assert checkout.times_made() == 4


def test_words_of_make_pretrain_arrive_as_they_are(tmp_path):
  """No shell and no make looks into them."""
  write(tmp_path / "bin" / "python", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
  (tmp_path / ".ready").touch()
  corpus, folder = """it's "a" $HOME/*.txt; `x`""", "a 'b' $(NP)"
  done = call(
    "make", "--no-print-directory", "pretrain", f"VENV={tmp_path}", "NP=3",
    f"CORPUS={corpus}", "ENCODING=$x", "LANGUAGE=fr", f"OUTPUT_DIR={folder}",
  )  # fmt: skip
  assert done.stdout.splitlines() == [
    "-m", "tools.quickstart", "--num_ranks=3", f"--corpus={corpus}",
    "--encoding=$x", "--language=fr", f"--output_dir={folder}",
  ], done.stderr  # fmt: skip


def test_make_shows_its_targets():
  """Each that people call, in 80 columns; and does nothing else."""
  shown = [
    call("make", "--no-print-directory", *words).stdout
    for words in ([], ["help"])
  ]
  assert shown[0] == shown[1]
  with open(f"{runs.ROOT}/Makefile", encoding="utf-8") as f:
    phony = re.search(r"^\.PHONY: (.*)$", f.read(), re.M)[1].split()
  lines = shown[0].splitlines()
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
