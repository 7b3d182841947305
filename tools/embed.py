"""Turns the texts of a file into vectors, in the file's order.

  python -m tools.embed runs/embedder --input=articles.jsonl --output=a.npy
  python -m tools.embed runs/embedder --input=scifact --output=a.parquet
  horovodrun -np 2 python -m tools.embed runs/embedder --input='t/*.parquet' \\
    --text_field=body --output=a.npy --dtype=float16

MODEL is a run folder of run_embedder.py, a folder of sentence-transformers, or
any other encoder. The input is plain text with a text on each line, JSON Lines,
CSV, TSV, Parquet, or a folder of BEIR's form. Memory does not grow with it. Any
number of these commands share the work, and one that was killed is resumed.
"""

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from checkpoints import checkpoint_weights
from common import input_files, stores
from common.console import Progress, counted, tell
from common.errors import DataError, UserError, needing
from common.settings import in_group, run_with, setting
from corpus import text_files
from interop import embedding, model_source
from model.tasks import DOCUMENT, SIDES
from retrieval import texts
from retrieval.texts import Texts
from workers import launchers, leases, shared_work, work_dir

_PLAN_VERSION = 2  # 1 took the indentation off texts
_CHUNK = 1024  # texts whose vectors are in memory at once
_TYPES = ("float32", "float16")
_text = in_group("Text")


@dataclasses.dataclass(frozen=True)
class _Workers(launchers.WorkerSettings):
  # fmt: off
  num_workers: int | None = setting(1,
    "Processes of this command, each with the whole model, which uses all "
    "cores. The vectors are the same for any number.", low=1, high=4096)
  # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
  """Which vectors a text gets; flags of all commands that embed."""

  # fmt: off
  text_field: str = _text(*text_files.TEXT_FIELD, alias="text_column")
  id_field: str = _text("id",
    "Field or column with the name of a text. Without it a text is named by "
    "its file, and its first byte or row.")
  max_seq_length: int | None = _text(None,
    "Tokens of a text at most; the end of a longer one is not read. Default: "
    "as in training.", low=4)
  parts: model_source.Given = setting(
    model_source.NOTHING_GIVEN, group="Parts of the model")
  # fmt: on

  def open(self, model: str) -> embedding.Embedder:
    return _open(model, self.parts, self.max_seq_length)

  def texts(self, files: str, side: str = DOCUMENT) -> Texts:
    """The texts of a flag that names files, for a side of a search."""
    name = texts.CORPUS_FILE if side == DOCUMENT else texts.QUERIES_FILE
    return texts.find(files, self.text_field, self.id_field, name)


@functools.cache  # once in each process
def _open(model: str, parts: model_source.Given, max_seq_length: int | None):
  source = model_source.find(model, parts)
  return embedding.open_embedder(source, max_seq_length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedSettings(ModelSettings):
  """What to embed, and where to; the names are the flags'."""

  # fmt: off
  input: str = setting(help=
    "Files with texts, names and globs, or a folder of BEIR's form.")
  output: str = setting(help=
    "File to write: *.npy, an array [texts, d], or *.parquet, with the columns "
    "id and embedding.")
  side: str = _text(DOCUMENT,
    "What the texts are of a search: the model's prompt and length for it.",
    choices=SIDES)
  dtype: str = setting(_TYPES[0],
    "Type of the numbers.", group="Output", choices=_TYPES)
  workers: _Workers = setting(_Workers(), group="Workers")
  # fmt: on


def vectors_of(
  embedder: embedding.Embedder, items: Iterable[str], count: int, side: str
) -> np.ndarray:
  """float32 [count, d]: the vectors of texts, with progress."""
  vectors = np.empty([count, embedder.size], np.float32)
  done = 0
  with Progress("embedding", count, "texts") as bar:
    for batch in _in_chunks(items):
      vectors[done : done + len(batch)] = embedder.embed(batch, side)
      done += len(batch)
      bar.at(done)
  return vectors


def _in_chunks(items: Iterable) -> Iterator[list]:
  return text_files.gathered(items, lambda item: 1, _CHUNK)


def _embed_piece(
  settings: EmbedSettings, model: str, piece: Texts, chunk_file, output: str
) -> None:
  """Makes chunks of ids and vectors of a piece."""

  def make(batch: list[tuple[str, str]], target: str) -> None:
    names, contents = zip(*batch, strict=True)
    vectors = settings.open(model).embed(contents, settings.side)
    vectors = vectors.astype(settings.dtype)
    empty = contents.count("")
    with open(target, "wb") as f:
      np.savez(f, names=np.array(names), vectors=vectors, empty=empty)

  shared_work.make_chunks(output, chunk_file, _in_chunks(piece.read()), make)


def _write_npy(path: str, chunks: Sequence[str], rows: int) -> None:
  """Joins the vectors of all chunks to one array on the disk."""
  first = np.load(chunks[0])["vectors"]
  header = np.lib.format.header_data_from_array_1_0(first)
  header |= {"shape": (rows, first.shape[1]), "fortran_order": False}
  # No memory map, to which a full disk is the end of the process.
  with open(path, "wb") as f:
    np.lib.format.write_array_header_1_0(f, header)
    for name in chunks:
      f.write(np.load(name)["vectors"].tobytes())


def _write_parquet(path: str, chunks: Sequence[str], rows: int) -> None:
  import pyarrow as arrow
  import pyarrow.parquet

  first = np.load(chunks[0])["vectors"]
  size = first.shape[1]
  kind = arrow.list_(arrow.from_numpy_dtype(first.dtype), size)
  schema = arrow.schema([("id", arrow.string()), ("embedding", kind)])
  with arrow.parquet.ParquetWriter(path, schema) as writer:
    for name in chunks:
      chunk = np.load(name)
      numbers = arrow.array(chunk["vectors"].ravel())
      lists = arrow.FixedSizeListArray.from_arrays(numbers, size)
      names = arrow.array(chunk["names"].tolist(), arrow.string())
      writer.write_table(arrow.table([names, lists], schema))


_WRITERS = {".npy": _write_npy, ".parquet": _write_parquet}


def embed(
  settings: EmbedSettings, model: str, worker: work_dir.Worker
) -> list[str] | None:
  """Makes the file, alone or with others; None: another worker made it."""
  output = stores.at(settings.output)
  kind = os.path.splitext(settings.output)[1].lower()
  if kind not in _WRITERS:
    raise UserError(f"--output={settings.output}: name it *.npy or *.parquet")
  if kind == ".parquet":
    with needing("text", f"--output={settings.output}"):
      import pyarrow.parquet  # noqa: F401, that it is there
  inputs = settings.texts(settings.input, settings.side)
  paths = dict.fromkeys(piece.path for piece in inputs.pieces)
  input_files.check_not_written(paths, "--input", settings.output)
  states = shared_work.states_of(paths)
  # By its checkpoint, beside which a run may be saving others.
  source = model_source.find(model, settings.parts)
  model = source.path
  if not worker.number:
    tell(*source.lines())

  def make(work: shared_work.SharedWork) -> list[str]:
    folder, tasks = work.folder("vectors"), []
    for number, piece in enumerate(inputs.pieces):
      path = f"{folder}/{number:06d}.json"
      part = inputs._replace(pieces=[piece])
      chunk_file = functools.partial("{}.{}.npz".format, path)
      run = functools.partial(_embed_piece, settings, model, part, chunk_file)
      tasks.append(leases.Task(path, run, chunk_file))
    phase = shared_work.Phase(tasks, work)
    phase.finish("embedding")
    shared_work.expect_unchanged(states)
    chunks, rows, empty = [*phase.chunks()], 0, 0
    for name in chunks:
      chunk = np.load(name)
      rows += len(chunk["names"])
      empty += int(chunk["empty"])
    if not rows:
      raise DataError(f"{settings.input}: no texts")
    path = os.path.join(work.folder("joined"), f"vectors{kind}")
    write = _WRITERS[kind]
    task = leases.Task(path, lambda target: write(target, chunks, rows))
    work.once(task, "another worker to join the vectors")
    work.await_publishing()
    work.publish([(path, output)])
    lines = [f"{settings.output}: the vectors of {counted(rows, 'text')}"]
    if empty:
      lines.append(f"of these {counted(empty, 'text')} without words")
    return lines

  plan = dataclasses.asdict(settings) | {"model": model, "files": states}
  plan |= {"task": source.task, "weights": checkpoint_weights.digest(model)}
  plan |= {"bert": source.bert.to_dict(), "version": _PLAN_VERSION}
  plan["tokenizer"] = source.tokenizer().digest()
  del plan["workers"]
  folder = os.path.dirname(settings.output)
  job = work_dir.Job(output.work_folder(), plan, "--output", folder)
  return shared_work.share(make, job, worker, settings.workers.num_workers)


def main(settings: EmbedSettings, model: str) -> None:
  """Embeds the texts, with the others of this command."""
  make = functools.partial(embed, settings, model)
  launchers.run_worker(settings.workers, make, settings.output)


if __name__ == "__main__":
  run_with(EmbedSettings, main, arguments=1)
