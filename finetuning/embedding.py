"""Vectors of texts, near where texts mean the same: for search and clusters."""

import dataclasses
import functools
import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from checkpoints import run_start
from checkpoints.metrics import BestBy
from common import files
from common import tensorflow_v1 as later
from common.console import counted
from common.errors import DataError, UserError
from common.settings import in_group
from corpus import tables
from finetuning import metrics, sides
from finetuning.groups import Group, GroupSource, Text
from finetuning.task import FinetuningConfig, FinetuningTask
from model.tasks import DOCUMENT, EMBEDDER, POOLINGS, QUERY, is_cosine
from retrieval import beir, measures, nearest
from retrieval.texts import is_beir

_data, _model = in_group("Data"), in_group("Model")
_loss, _eval = in_group("Loss"), in_group("Evaluation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedderConfig(FinetuningConfig):
  """Settings of run_embedder.py; fields are named like its flags."""

  # fmt: off
  eval_file: str | None = _data(None,
    "File to evaluate on, which chooses the best checkpoint: {format}, or a "
    "folder in BEIR's form (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv).")
  eval_split: str = _data("test",
    "SPLIT of --eval_file, if that is a folder in BEIR's form.")
  text_column: str = _data("anchor",
    "Column of the text that is searched with, such as a question.")
  text_pair_column: str = _data("positive",
    "Column of the text that belongs to it, such as a paragraph that answers "
    "it.")
  negative_columns: tuple = _data((),
    "Columns of texts that do not belong to it. A column holds a text or, in "
    "JSON Lines and Parquet, a list of them; an empty one is none.")
  score_column: str | None = _data(None,
    "Column of a number, higher for texts that are more alike. The loss is "
    "then CoSENT, which learns the order of the scores; with --simcse they are "
    "for evaluation only.",
    excludes=("negative_columns",))
  simcse: bool = _data(False,
    "The training data have no pairs: each text of --text_column is its own "
    "positive, under another dropout. A table to evaluate on has them.",
    excludes=("negative_columns",))
  query_prompt: str = _data("",
    "What comes before each text of --text_column, such as 'query: '.")
  document_prompt: str = _data("",
    "What comes before all other texts, such as 'passage: '.")
  include_prompt: bool = _data(True,
    "Take the tokens of the prompt into the mean of --pooling.")
  query_length: int = _data(0,
    "Tokens of a text of --text_column at most. 0: --max_seq_length.", low=0)
  pooling: str = _model("mean",
    "What a text's vector is: the mean of its tokens' outputs, or the output "
    "of its first token, [CLS].", choices=POOLINGS)
  temperature: float = _loss(0.05,
    "What cosines are divided by before the softmax.", low=0.005, high=1.0)
  both_directions: bool = _loss(False,
    "Also look for the text of --text_column that belongs to each text of "
    "--text_pair_column; the loss is the mean of both.",
    excludes=("score_column",))
  matryoshka_dims: tuple = _loss((),
    "Add the losses of the first numbers of the vectors, so many each, such as "
    "64,128,256, to that of all: then a vector can be cut to these lengths.")
  # fmt: on

  kind: ClassVar[str] = EMBEDDER
  inherits: ClassVar[bool] = True

  @classmethod
  def defaults(cls, task, flags):
    saved = super().defaults(task, flags)
    settled = set[str]()
    if flags.get("negative_columns"):
      settled |= {"score_column", "simcse"}
    elif flags.get("score_column") or flags.get("simcse"):
      settled.add("negative_columns")
    if flags.get("pooling") == "cls":
      settled.add("include_prompt")
    length = saved.get("query_length", 0)
    if flags.get("max_seq_length", length) < length:
      settled.add("query_length")
    return {name: saved[name] for name in saved.keys() - settled}

  def __post_init__(self):
    super().__post_init__()
    most = self.bert.hidden_size
    for size in self.matryoshka_dims:
      if not size.isdecimal() or not 0 < int(size) <= most:
        raise UserError(
          f"--matryoshka_dims: {size} is not a number of 1 to {most}, the "
          "numbers of a vector"
        )
    if self.pooling == "cls" and not self.include_prompt:
      raise UserError(
        "--noinclude_prompt leaves the prompt out of a mean, but --pooling=cls "
        "has none: leave it out"
      )
    if self.query_length and not 4 <= self.query_length <= self.max_seq_length:
      raise UserError(
        f"--query_length={self.query_length}: must be 4 to "
        f"--max_seq_length={self.max_seq_length}"
      )

  @property
  def dims(self) -> list[int]:
    """The numbers of --matryoshka_dims."""
    return [int(size) for size in self.matryoshka_dims]


class Pair(NamedTuple):
  """A row of a table of pairs."""

  first: str
  second: str
  negatives: Sequence[str] = ()
  score: float = 0.0
  line: int = 0


class Texts:
  """Texts as inputs of the encoder, each encoded once."""

  def __init__(self, config: EmbedderConfig, task: dict):
    """`task` is the content of task.json."""
    tokenizer = config.tokenizer()
    self._sides = {
      QUERY: sides.of_task(
        task, QUERY, tokenizer, config.query_length or config.max_seq_length
      ),
      DOCUMENT: sides.of_task(task, DOCUMENT, tokenizer, config.max_seq_length),
    }
    self._known: dict[tuple[str, str], Text] = {}
    self._identities: dict[str, int] = {}
    self.cut = 0  # texts that lost their end

  def encode(self, texts: Iterable[str], side: str) -> list[Text]:
    """The texts, of which all are searched with or all are found."""
    texts, new = [*texts], []
    for text in dict.fromkeys(texts):
      if (side, text) not in self._known:
        new.append(text)
    own = self._sides[side]
    for text, (ids, lost) in zip(new, own.encode(new), strict=True):
      self.cut += lost > 0
      identity = self._identities.setdefault(text, len(self._identities))
      self._known[side, text] = Text(ids, own.pooled, identity)
    return [self._known[side, text] for text in texts]


class Singles(GroupSource):
  """Texts one by one, to evaluate or predict with: queries, then documents."""

  def __init__(
    self,
    path: str,
    texts: Texts,
    queries: Iterable[str],
    documents: Iterable[str],
    names: Iterable,
    config: EmbedderConfig,
    measure: Callable[[np.ndarray], dict[str, float]] | None = None,
  ):
    """`measure` has metrics of their vectors, float32 [texts, d]."""
    inputs = texts.encode(queries, QUERY) + texts.encode(documents, DOCUMENT)
    groups = []
    for text, name in zip(inputs, names, strict=True):
      groups.append(Group([text], str(name)))
    super().__init__(path, groups, config, texts.cut)
    self.measure = measure

  def vectors(self, outputs: dict) -> np.ndarray:
    """float32 [texts, H]"""
    return outputs["vectors"][self.record_of, self.slot_of]


class Embedding(FinetuningTask):
  """Learns vectors of texts, which pairs of texts compare."""

  config: EmbedderConfig
  compares = True

  def __init__(self, config: EmbedderConfig):
    super().__init__(config)
    self._notes: list[str] = []
    folder = config.eval_file and is_beir(config.eval_file)  # without scores
    self._by_scores = bool(config.score_column) and not folder
    best = "spearman" if self._by_scores else "ndcg_at_10"
    self.best_by = BestBy((best,), True)

  def lines(self):
    return self._notes

  @functools.cached_property
  def _geometry(self) -> dict:
    """How vectors are compared: by cosines, which training learns.

    A model that is only used, such as another library's, may say otherwise.
    """
    task = {} if self.config.do_train else run_start.origin_of(self.config).task
    return {
      "normalize": task.get("normalize", True),
      "similarity": task.get("similarity", "cosine"),
    }

  def read(self, part):
    path, config = self.config.path(part), self.config
    texts = Texts(config, self.describe())
    if part == "train":
      return self._read_groups(path, texts)
    if part == "predict":
      rows = tables.read_table(path, all_rows=True)
      column = tables.column(path, rows, config.text_column, "--text_column")
      sides = ([], column) if config.simcse else (column, [])
      return Singles(path, texts, *sides, [row.line for row in rows], config)
    cosine = is_cosine(self._geometry)
    if self._by_scores:
      firsts, seconds, _, scores, names = zip(*self._pairs(path), strict=True)
      measure = functools.partial(measured_pairs, np.array(scores), cosine)
      return Singles(path, texts, firsts, seconds, names * 2, config, measure)
    if is_beir(path):
      collection = beir.read(path, config.eval_split)
    else:
      collection = collection_of(self._pairs(path))
    queries, documents = collection.queries, collection.documents
    both, ids = (queries.values(), documents.values()), [*queries, *documents]
    measure = functools.partial(measured_search, collection, cosine)
    return Singles(path, texts, *both, ids, config, measure)

  def _read_groups(self, path: str, texts: Texts) -> GroupSource:
    # All at once, so that the tokenizer is called once. Texts of --simcse have
    # one side: they are their own positives.
    simcse = self.config.simcse
    pairs = self._singles(path) if simcse else self._pairs(path)
    side = DOCUMENT if simcse else QUERY
    firsts = texts.encode([pair.first for pair in pairs], side)
    documents = []
    for pair in pairs:
      documents += [pair.second, *pair.negatives]
    others, groups = iter(texts.encode(documents, DOCUMENT)), []
    for first, pair in zip(firsts, pairs, strict=True):
      members = [first, *itertools.islice(others, 1 + len(pair.negatives))]
      groups.append(Group(members, f"line {pair.line}", pair.score))
    return GroupSource(path, groups, self.config, texts.cut)

  def _column(self, path: str, rows, flag: str) -> list[str]:
    """The texts that a flag names, none of them empty."""
    name = getattr(self.config, flag)
    return tables.column(path, rows, name, f"--{flag}", may_be_empty=False)

  def _singles(self, path: str) -> list[Pair]:
    """A file's texts, each with itself."""
    rows = tables.read_table(path)
    texts = self._column(path, rows, "text_column")
    both = zip(texts, rows, strict=True)
    return [Pair(text, text, line=row.line) for text, row in both]

  def _pairs(self, path: str) -> list[Pair]:
    """A file's pairs, but for those of two equal texts, which teach nothing."""
    config, rows = self.config, tables.read_table(path)
    firsts = self._column(path, rows, "text_column")
    seconds = self._column(path, rows, "text_pair_column")
    scores = [0.0] * len(rows)
    if config.score_column:
      texts = self._column(path, rows, "score_column")
      scores = tables.numbers(path, rows, config.score_column, texts)
    lines = [row.line for row in rows]
    columns = firsts, seconds, self._negatives(path, rows), scores, lines
    pairs, equal = [], []
    for pair in map(Pair, *columns):
      if pair.first != pair.second or config.score_column:
        pairs.append(pair)
      else:
        equal.append(pair.line)
    if equal:
      note = (
        f"{path}: {counted(len(equal), 'row')} left out, whose text is its own "
        f"positive, first line {equal[0]} (--simcse learns from single texts)"
      )
      if not pairs:
        raise DataError(note)
      self._notes.append(note)
    return pairs

  def _negatives(self, path: str, rows) -> list[list[str]]:
    """Each row's negatives."""
    negatives: list[list[str]] = [[] for _ in rows]
    for name in self.config.negative_columns:
      if not any(name in row.values for row in rows):
        if path == self.config.train_file:
          tables.column(path, rows, name, "--negative_columns")  # says so
        self._notes.append(f"{path}: has no {name!r} of --negative_columns")
        continue
      lists = tables.lists(path, rows, name)
      for of_row, texts in zip(negatives, lists, strict=True):
        of_row += texts
    others = [key for key in rows[0].values if key.startswith("negative")]
    if others and not self.config.negative_columns:
      self._notes.append(
        f"{path}: its columns {', '.join(others)} are not read: see "
        "--negative_columns"
      )
    return negatives

  def losses(self, groups):
    from finetuning import contrastive  # it loads TensorFlow

    config = self.config
    if config.score_column and not config.simcse:
      return contrastive.cosent(groups, config.temperature, config.dims)
    return contrastive.info_nce(
      groups, config.temperature, config.both_directions, config.dims
    )

  def head(self, batch, is_training, dropout_seed=None):
    """`heads.HeadOutput` of single texts: "vectors", float32 [B, G, H]."""
    from finetuning import contrastive, heads  # these load TensorFlow

    vectors = contrastive.embed(batch, self, is_training, dropout_seed)
    shape = [*batch.weights.shape, vectors.shape[2]]
    vectors = later.tf.reshape(vectors, shape)
    return heads.HeadOutput(None, None, {"vectors": vectors})

  def _vectors(self, source, outputs: dict) -> np.ndarray:
    """The texts' vectors as tools.embed makes them, float32 [texts, H]."""
    vectors = source.vectors(outputs)
    return nearest.unit(vectors) if self._geometry["normalize"] else vectors

  def results(self, source, outputs):
    vectors = self._vectors(source, outputs)
    results = source.measure(vectors)
    for size in self.config.dims:
      for name, value in source.measure(vectors[:, :size]).items():
        results[f"{name}/{size}"] = value
    return results

  def write_predictions(self, source, outputs):
    """The texts' vectors, float32 [texts, H], in order."""
    content = io.BytesIO()
    np.save(content, self._vectors(source, outputs))
    path = self.config.output_file("vectors.npy")
    files.write(path, content.getvalue())
    return [f"vectors {path}"]

  def describe(self):
    config = self.config
    return {
      "pooling": config.pooling,
      **self._geometry,
      "prompts": {QUERY: config.query_prompt, DOCUMENT: config.document_prompt},
      "include_prompt": config.include_prompt,
      "query_length": config.query_length,
      "matryoshka_dims": config.dims,
      "text_column": config.text_column,
      "text_pair_column": config.text_pair_column,
      "negative_columns": list(config.negative_columns),
      "score_column": config.score_column,
      "simcse": config.simcse,
    }


def measured_search(
  collection: beir.Collection, is_cosine: bool, vectors: np.ndarray
) -> dict[str, float]:
  """Metrics of the vectors of queries and then documents, [texts, d]."""
  queries, documents = np.split(vectors, [len(collection.queries)])
  best = nearest.top_k(queries, documents, measures.SEARCHED, is_cosine)
  results = {}
  for name, value in measures.evaluate(collection, *best).items():
    results[name.replace("@", "_at_")] = value
  return results


def measured_pairs(
  scores: np.ndarray, is_cosine: bool, vectors: np.ndarray
) -> dict[str, float]:
  """Metrics of the vectors of pairs' first texts, then second ones."""
  compared = nearest.unit(vectors) if is_cosine else vectors
  firsts, seconds = np.split(compared, 2)
  products, results = np.sum(firsts * seconds, axis=1), {}
  for name in ("spearman", "pearson"):
    results[name] = metrics.OF_NUMBERS[name](scores, products)
  return results


def collection_of(pairs: Iterable[Pair]) -> beir.Collection:
  """Pairs as a search: each text's positives are to be found among all."""
  # A text in both columns has one id, by which `measures.evaluate` knows it.
  ids: dict[str, str] = {}
  collection = beir.Collection({}, {}, {})
  for pair in pairs:
    query = ids.setdefault(pair.first, f"text {len(ids)}")
    collection.queries[query] = pair.first
    for text in (pair.second, *pair.negatives):
      document = ids.setdefault(text, f"text {len(ids)}")
      collection.documents[document] = text
    collection.qrels.setdefault(query, {})[ids[pair.second]] = 1
  return collection
