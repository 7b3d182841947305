"""Text to a pre-trained BERT in one command: what `make pretrain` runs.

  python -m tools.quickstart --corpus='texts/*.txt' --output_dir=runs/mine

It prepares text, trains a vocabulary, writes records, pre-trains a small BERT
on Horovod ranks, evaluates it on held-out documents, and ends with one screen.
Each step is a command of this project, which is printed. A second call makes
what is missing and resumes the training, which ends at once if it is complete.
"""

import codecs
import contextlib
import dataclasses
import functools
import glob
import importlib.metadata
import itertools
import os
import textwrap
import time

from checkpoints import checkpoint_files, metrics
from common import input_files, json_files, processes
from common.console import counted, shown, tell
from common.errors import UserError
from common.model_files import RUN_FILE
from common.nvidia import visible_gpus
from common.settings import run_with, setting
from config.bert_config import PRESETS, BertConfig
from corpus import text_files
from interop import model_source, predictions
from records import data_set
from text_encoders.base import MASK, config_beside
from tools import plot_metrics
from training import next_steps

# The smallest of each kind, which train in 2 to 4 minutes on two cores.
SMALLEST = {"bert": "tiny", "modern": "modern_tiny"}
VOCAB_SIZE = 8192
SEQ_LENGTH = 32  # most of the sample text's sentences are shorter
# Examples of an update, on any number of ranks: 96 records of the sample text.
GLOBAL_BATCH = 108
UPDATES = 2000
PARTS = ("train", "heldout")
SHOWN_SENTENCES = 4  # of the held-out text, in the closing screen
_OTHER_FOLDER = "choose another folder (make pretrain OUTPUT_DIR=...)"


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of `make pretrain`, and how long to train."""

  # fmt: off
  num_ranks: int = setting(2, "Horovod ranks to train on.", low=1)
  corpus: str = setting("",
    "Text files of your own: names and globs (quoted), blank lines between "
    "documents. Empty: first paragraphs of English Wikipedia.")
  encoding: str = setting("utf-8",
    "Encoding of the text files, any of Python's.")
  language: str = setting("en",
    "ISO 639-1 code of the text's language, for its sentence ends. Only "
    "English is lower-cased, because that removes accents as well.")
  output_dir: str = setting("runs/quickstart",
    "Folder for all output, of one corpus and model.")
  model: str = setting("bert",
    "Model to train: bert or modern (ModernBERT's layers), the smallest of its "
    "kind, or another preset of --bert_config_file.",
    choices=(*SMALLEST, *PRESETS))
  num_train_steps: int = setting(UPDATES, "Updates to train for.", low=1)
  # fmt: on

  def __post_init__(self):
    if "," in self.output_dir:
      raise UserError(
        f"--output_dir={self.output_dir}: a comma separates names of files in "
        "the commands to come: give a folder without one"
      )
    text_files.check_language("language", self.language)
    if self.language != "en" and not self.corpus:
      raise UserError(
        f"--language={self.language} needs --corpus: the sample text is English"
      )


class Paths:
  """The files in the output folder, `root`; PARTS are train and heldout."""

  def __init__(self, root: str):
    self.root = root
    self.source = os.path.join(root, "source.json")
    self.corpus = os.path.join(root, "corpus")
    self.vocab = os.path.join(root, "vocab.txt")
    self.case = config_beside(self.vocab)  # written after it
    self.config = os.path.join(root, "bert_config.json")
    self.pretrain = os.path.join(root, "pretrain")
    self.curve = os.path.join(root, "curve.png")

  def text(self, part: str) -> str:
    return os.path.join(self.corpus, f"{part}.txt")

  def records(self, part: str) -> str:
    return os.path.join(self.root, "records", f"{part}.tfrecord")

  def shards(self, part: str) -> str:
    """A glob, but the folder's own name is none."""
    folder = os.path.join(glob.escape(self.root), "records")
    return os.path.join(folder, f"{part}*.tfrecord")

  def manifest(self, part: str) -> str:
    return os.path.join(self.root, "records", part + data_set.MANIFEST_SUFFIX)

  def counts(self, part: str) -> dict:
    return data_set.Manifest.load(self.manifest(part)).counts


def source_of(paths: Paths, settings: Settings) -> dict:
  """What the text is made from; UserError if the folder's is from another."""
  text = text_files.TextFormat(encoding=settings.encoding)
  files = []
  if settings.corpus:
    for path in input_files.expand_patterns(settings.corpus):
      files.append([path, os.path.getsize(path), int(os.path.getmtime(path))])
  source = {
    "corpus": settings.corpus, "encoding": codecs.lookup(text.encoding).name,
    "language": settings.language, "files": files,
  }  # fmt: skip
  if os.path.exists(paths.source) and json_files.read(paths.source) != source:
    raise UserError(
      f"{paths.root} was made from other text, see {paths.source}: give that "
      f"text with its encoding and language, or {_OTHER_FOLDER}"
    )
  return source


def run(title: str, command: list[str]) -> None:
  """Prints and runs one command; UserError if it failed."""
  print(f"\n== {title}\n{next_steps.wrapped(command, '$ ')}", flush=True)
  show = functools.partial(print, end="", flush=True)
  seconds = processes.run(title, command, show)
  print(f"({seconds:.0f} s)", flush=True)


def prepare(paths: Paths, settings: Settings) -> None:
  """Makes text, vocabulary, records and the model's config, if missing."""
  source = source_of(paths, settings)
  text = next_steps.python(
    "tools.prepare_corpus", output_dir=paths.corpus, corpus=settings.corpus,
    encoding=settings.encoding, language=settings.language,
  )  # fmt: skip
  vocabulary = next_steps.python(
    "tools.train_tokenizer", input_file=paths.text("train"),
    output_file=paths.vocab, vocab_size=VOCAB_SIZE,
  )  # fmt: skip
  title = "text: one sentence a line, some documents held out"
  # (title, output, command). The source is written after the text is made.
  steps = [(title, paths.source, text), ("vocabulary", paths.case, vocabulary)]
  for part in PARTS:
    command = next_steps.python(
      "create_pretraining_data.py", input_file=paths.text(part),
      output_file=paths.records(part), vocab_file=paths.vocab,
      objective="mlm", dynamic_masks=True, max_seq_length=SEQ_LENGTH,
      examples_per_record=2,  # the short ends of documents
    )  # fmt: skip
    title = f"records of {paths.text(part)}"
    steps.append((title, paths.manifest(part), command))
  # A step is done if its output is there: each makes it whole or not at all.
  for title, output, command in steps:
    if not os.path.exists(output):
      run(title, command)
      json_files.write(paths.source, source)
  preset = PRESETS[SMALLEST.get(settings.model, settings.model)]
  # A few minutes see little text twice: dropout would only slow learning down.
  bert = BertConfig.from_json_file(preset).with_dropout(0.0, 0.0)
  bert.max_position_embeddings = 128
  manifest = data_set.Manifest.load(paths.manifest("train"))
  bert.vocab_size = manifest.tokenizer.vocab_size
  if checkpoint_files.has_begun(paths.pretrain):
    if bert.differences(BertConfig.from_json_file(paths.config)):
      raise UserError(
        f"{paths.root} has a training of another model, see {paths.config}: "
        f"give that MODEL, or {_OTHER_FOLDER}"
      )
  json_files.write(paths.config, bert.to_dict())


def ranks_here(ranks: int) -> int:
  """`ranks`, or one for each GPU if there are fewer; one without Horovod."""
  if ranks > 1 and not os.path.exists(processes.HOROVODRUN):
    tell("one rank, because Horovod is not built: make horovod builds it")
    return 1
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    importlib.metadata.distribution("tensorflow-cpu")
    return ranks  # it uses no GPU
  return min(ranks, len(visible_gpus("name")) or ranks)


def optimizer_flags(paths: Paths) -> dict:
  """Muon's; or those of the optimizer with which the folder's run began."""
  muon = {
    "optimizer": "muon", "muon_steps": 3, "muon_coefficients": "polar_express",
  }  # fmt: skip
  path = os.path.join(paths.pretrain, RUN_FILE)
  if not os.path.exists(path):
    return muon
  began = json_files.read(path)["runs"][0]["flags"]["optimizer"]
  # Releases before Muon wrote none of its settings.
  return {name: began[name] for name in muon if name in began}


def pretraining_command(paths: Paths, ranks: int, updates: int) -> list[str]:
  """The command that pre-trains and evaluates, under horovodrun if on ranks.

  The global batch, and so the run, is the same for any number of ranks.
  """
  # Little text may be less than one batch.
  batch = min(GLOBAL_BATCH, paths.counts("train")["examples"])
  command = next_steps.python(
    "run_pretraining.py", do_train=True, do_eval=True,
    bert_config_file=paths.config, input_file=paths.shards("train"),
    eval_input_file=paths.shards("heldout"), output_dir=paths.pretrain,
    global_batch_size=batch,
    train_batch_size=-(-batch // ranks),  # the last rank may have fewer
    precision="auto",
    # docs/results.md has what these bring, and where they fail.
    masked_lm_prob="0.3:0.15", beta_2=0.999, initial_weights="informed",
    learning_rate=3e-3, **optimizer_flags(paths),
    bias_correction=True,  # else a rate this high undoes the first updates
    num_train_steps=updates, num_warmup_steps=min(200, updates // 10),
    eval_every_steps=max(1, updates // 10),
    save_checkpoints_steps=max(1, updates // 4),
  )  # fmt: skip
  return processes.horovodrun(ranks, command)


def masked_sentences(sentences: list[str], tokenizer) -> list[tuple[str, str]]:
  """A few sentences with a [MASK] in the middle, each with the hidden word."""
  known = set(tokenizer.tokens)
  masked = []
  encoded = tokenizer.encode_batch(sentences)
  for sentence, ids in zip(sentences, encoded, strict=True):
    words = sentence.split()
    positions = []
    for position, word in enumerate(words):
      # A token of its own; shorter words are mostly a matter of grammar.
      if len(word) > 3 and (word in known or word.lower() in known):
        positions.append(position)
    # With [CLS] and [SEP] it is no longer than what the model was trained on.
    if positions and len(words) > 5 and len(ids) <= SEQ_LENGTH - 2:
      hidden = positions[len(positions) // 2]
      text = " ".join([*words[:hidden], MASK, *words[hidden + 1 :]])
      masked.append((text, words[hidden]))
  every = -(-len(masked) // SHOWN_SENTENCES) or 1
  return masked[::every]


def fill_mask(paths: Paths) -> list[str]:
  """Lines with what the model says for masked words of held-out text."""
  source = model_source.find(paths.pretrain)
  with open(paths.text("heldout"), encoding="utf-8") as f:
    sentences = list(itertools.islice(f, 1000))
  masked = masked_sentences(sentences, source.tokenizer())
  if not masked:
    return []
  predictor = predictions.load(source, top_k=3)
  answers = predictor.predict([predictions.Input(text) for text, _ in masked])
  predictor.close()
  lines = ["", "Held-out sentences: the model's words for [MASK]"]
  for (text, word), (answer, _) in zip(masked, answers, strict=True):
    best = []
    for guess in answer["masks"][0]:
      best.append(f"{guess['word']} {guess['probability']:.0%}")
    lines += [
      textwrap.fill(text, 78, initial_indent="  ", subsequent_indent="  "),
      f"    {'   '.join(best)}   (right: {word})",
    ]
  return lines


def screen(paths: Paths, ranks: int, sentences: list[str]) -> str:
  """The closing text; `sentences`: lines of `fill_mask`."""
  evaluations = metrics.evaluations(paths.pretrain)
  first, last = evaluations[0], evaluations[-1]
  step = last["global_step"]
  documents = paths.counts("heldout")["documents"]
  entropy = paths.counts("train")["unigram_entropy"]

  def row(label, key, form):
    before, after = shown(first[key], form), shown(last[key], form)
    return f"  {label:<26}{before:>10}{after:>10}"

  longer = pretraining_command(paths, ranks, 2 * step)
  lines = [
    "",
    f"Held out: {last['examples']:,} examples of {documents:,} documents, "
    f"before and after {step:,} updates",
    f"  {'':<26}{'before':>10}{'after':>10}",
    row("masked LM loss (nats)", "masked_lm_loss", ".3f")
    + f"    unigram entropy {entropy:.3f}",
    row("masked LM accuracy", "masked_lm_accuracy", ".1%"),
    *sentences,
    "",
    f"curve       {paths.curve}",
    *next_steps.lines({"continue training": longer}),
  ]
  return "\n".join(lines)


def main(settings: Settings) -> None:
  """Runs all steps that are not done yet."""
  began = time.monotonic()
  paths = Paths(settings.output_dir)
  prepare(paths, settings)
  ranks = ranks_here(settings.num_ranks)
  run(
    f"pre-training on {counted(ranks, 'rank')}",
    pretraining_command(paths, ranks, settings.num_train_steps),
  )
  plot_metrics.plot([paths.pretrain], paths.curve)
  print(screen(paths, ranks, fill_mask(paths)))
  print(f"all in all {(time.monotonic() - began) / 60:.1f} min")


if __name__ == "__main__":
  run_with(Settings, main)
