"""Text to a pre-trained BERT in one command: what `make pretrain` runs.

  python -m tools.quickstart --corpus='texts/*.txt' --output_dir=runs/mine

It prepares text, trains a vocabulary, writes records, pre-trains a small BERT
on Horovod ranks, evaluates it on held-out documents, and ends with one screen.
Each step is a command of this project, which is printed; a second call reuses
what the first one made.
"""

import codecs
import contextlib
import dataclasses
import functools
import glob
import importlib.metadata
import itertools
import math
import os
import textwrap
import time
from collections.abc import Iterator, Sequence

from checkpoints import metrics, run_folder
from common import console, json_files, processes
from common.errors import UserError
from common.nvidia import visible_gpus
from common.settings import run_with, setting
from data import records, text_files
from tokenization import MASK
from tools import plot_metrics
from training import next_steps, reporting
from training.next_steps import python

# These train in 2 to 4 minutes on two cores; the README shows the result.
MODEL = dict(
  hidden_size=128,
  num_hidden_layers=2,
  num_attention_heads=2,
  intermediate_size=512,
  hidden_act="gelu",
  # A few minutes see little text twice: dropout would only slow learning down.
  hidden_dropout_prob=0.0,
  attention_probs_dropout_prob=0.0,
  max_position_embeddings=128,
  type_vocab_size=2,
  # 0.02 is for a hidden size of 768; narrow layers need larger weights for
  # their outputs to have the same size (0.02 * sqrt(768 / 128) = 0.05).
  initializer_range=0.05,
)
VOCAB_SIZE = 8192
SEQ_LENGTH = 32  # most of the sample text's sentences are shorter
# Examples an update of a new run, on any number of ranks: of the sample text 96
# records.
GLOBAL_BATCH = 108
UPDATES = 2000
WARMUP_UPDATES = 200
# docs/results.md, "Recipes", has what these bring, and where they fail.
LEARNING_RATE = 3e-3
MASKED_LM_PROB = "0.3:0.15"
RECORDS = dict(
  objective="mlm",
  dynamic_masks=True,
  max_seq_length=SEQ_LENGTH,
  examples_per_record=2,  # the short ends of documents
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of `make pretrain`, and how long to train."""

  # fmt: off
  num_ranks: int = setting(2, "Horovod ranks to train on.", low=1)
  corpus: str = setting("",
    "Text files of your own: names and globs (quoted), blank lines between "
    "documents. Empty: the leads of English Wikipedia articles.")
  encoding: str = setting("utf-8",
    "Encoding of the text files, any of Python's.")
  language: str = setting("en",
    "ISO 639-1 code of the text's language, for its sentence ends. Only "
    "English is lower-cased, because that removes accents as well.")
  output_dir: str = setting("runs/quickstart",
    "Folder for all output, of one corpus.")
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
  """The files in the output folder, `root`."""

  def __init__(self, root: str):
    inside = functools.partial(os.path.join, root)
    self.root = root
    self.source = inside("source.json")
    self.corpus = inside("corpus")
    self.train_text = inside("corpus", "train.txt")
    self.heldout_text = inside("corpus", "heldout.txt")
    self.vocab = inside("vocab.txt")
    self.train_records = inside("records", "train.tfrecord")
    self.train_manifest = inside("records", "train.manifest.json")
    self.heldout_records = inside("records", "heldout.tfrecord")
    self.heldout_manifest = inside("records", "heldout.manifest.json")
    # Globs, but not the folder's own name.
    shards = os.path.join(glob.escape(root), "records")
    self.train_shards = os.path.join(shards, "train*.tfrecord")
    self.heldout_shards = os.path.join(shards, "heldout*.tfrecord")
    self.config = inside("bert_config.json")
    self.pretrain = inside("pretrain")
    self.curve = inside("curve.png")


def run(title: str, command: list[str], until: str = "") -> None:
  """Prints and runs one command; UserError if it failed.

  Of its own lines those from the one that begins with `until` are not shown.
  """
  print(f"\n== {title}\n{next_steps.wrapped(command, '$ ')}", flush=True)
  hidden: list[str] = []

  def show(line):
    if hidden or (until and line.startswith(until)):
      hidden.append(line)
    else:
      print(line, end="", flush=True)

  try:
    seconds = processes.run(title, command, show)
  except (UserError, SystemExit):
    print(*hidden, sep="", end="")
    raise
  print(f"({seconds:.0f} s)", flush=True)


def check_source(paths: Paths, given: Settings) -> None:
  """Records the text in `paths.source`; UserError if files are of another."""
  text = text_files.TextFormat(encoding=given.encoding)
  corpus = given.corpus
  files = [
    [path, os.path.getsize(path), int(os.path.getmtime(path))]
    for path in (records.expand_patterns(corpus) if corpus else ())
  ]
  source = {
    "corpus": corpus,
    "encoding": codecs.lookup(text.encoding).name,
    "language": given.language,
    "files": files,
  }
  made = (paths.heldout_text, paths.vocab, paths.train_manifest)
  if os.path.exists(paths.source) and any(map(os.path.exists, made)):
    # Older folders do not record these two.
    older = {"encoding": "utf-8", "language": "en"}
    if older | json_files.read(paths.source) != source:
      raise UserError(
        f"{paths.root} was made from other text, see {paths.source}: give "
        "that text with its encoding and language, or choose another folder "
        "(make pretrain OUTPUT_DIR=...)"
      )
  os.makedirs(paths.root, exist_ok=True)
  json_files.write(paths.source, source)


def prepare(paths: Paths, given: Settings) -> None:
  """Makes text, vocabulary and records, if they are missing."""
  case = {} if given.language == "en" else {"do_lower_case": False}

  def make(missing, title, script, **flags):
    if not os.path.exists(missing):
      run(title, python(script, **flags))

  make(
    paths.heldout_text,
    "text: one sentence a line, some documents held out",
    "tools.prepare_corpus",
    output_dir=paths.corpus,
    corpus=given.corpus,
    encoding=given.encoding,
    language=given.language,
  )
  make(
    paths.vocab,
    "vocabulary",
    "tools.train_tokenizer",
    input_file=paths.train_text,
    output_file=paths.vocab,
    vocab_size=VOCAB_SIZE,
    **case,
  )
  for text, output, manifest in (
    (paths.train_text, paths.train_records, paths.train_manifest),
    (paths.heldout_text, paths.heldout_records, paths.heldout_manifest),
  ):
    make(
      manifest,
      f"records of {text}",
      "create_pretraining_data.py",
      input_file=text,
      output_file=output,
      vocab_file=paths.vocab,
      **case,
      **RECORDS,
    )


@functools.cache
def gpus() -> list[float]:
  """The compute capability of each GPU that TensorFlow uses here."""
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    importlib.metadata.distribution("tensorflow-cpu")
    return []
  return list(map(float, visible_gpus("compute_cap")))


def ranks_here(asked: int) -> int:
  """`asked`, or as many as there are GPUs: a rank has one of its own."""
  if not 0 < len(gpus()) < asked:
    return asked
  print(f"a rank for each GPU: {len(gpus())}, not {asked}")
  return len(gpus())


def best_precision() -> str:
  """bf16 if this machine multiplies it faster than float32, else fp32."""
  if gpus():
    return "bf16" if min(gpus()) >= 8.0 else "fp32"
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as f:
      flags = f.read().split()
  except OSError:  # not Linux
    return "fp32"
  fast = "avx512_bf16" in flags or "amx_bf16" in flags
  return "bf16" if fast else "fp32"


def held_flags(paths: Paths) -> dict:
  """The flags of the run that the folder holds, by name; {} without one."""
  before = run_folder.last_training(paths.pretrain)
  saved = os.path.join(glob.escape(paths.pretrain), "model.ckpt-*.index")
  if not (before and glob.glob(saved)):
    return {}
  made = {"initial_weights": "random", **before["flags"]}  # of an older folder
  return made | made.get("optimizer", {})


def steps_to_make(paths: Paths, given: int) -> int:
  """`given`, or what the folder's run was asked for since, if that is more."""
  asked = held_flags(paths).get("num_train_steps", 0)
  if asked > given:
    print(f"{paths.pretrain}: was continued to {asked:,} updates, which hold")
  return max(given, asked)


def pretraining_flags(paths: Paths, ranks: int, updates: int) -> dict:
  """The flags that pre-train and evaluate."""
  # A run that the folder holds keeps its global batch and optimizer.
  made, most = held_flags(paths), GLOBAL_BATCH
  masks = {"masked_lm_prob": MASKED_LM_PROB}
  if os.path.exists(paths.train_manifest):
    manifest = records.Manifest.load(paths.train_manifest)
    most = min(most, manifest.counts["examples"])
    if manifest.masking == "static":
      masks = {}  # an older folder
  batch = made.get("global_batch_size") or most
  return dict(
    do_train=True,
    do_eval=True,
    bert_config_file=paths.config,
    input_file=paths.train_shards,
    eval_input_file=paths.heldout_shards,
    output_dir=paths.pretrain,
    global_batch_size=batch,
    train_batch_size=-(-batch // ranks),  # the last rank may have fewer
    precision=best_precision(),
    **masks,
    learning_rate=LEARNING_RATE,
    bias_correction=True,  # else a rate this high undoes the first updates
    beta_2=made.get("beta_2", 0.999),
    initial_weights=made.get("initial_weights", "informed"),
    num_train_steps=updates,
    num_warmup_steps=min(WARMUP_UPDATES, updates // 10),
    eval_every_steps=max(1, updates // 10),
    save_checkpoints_steps=max(1, updates // 4),
  )


def pretraining_command(paths: Paths, ranks: int, updates: int) -> list[str]:
  """The command with these flags, on several ranks under horovodrun."""
  flags = pretraining_flags(paths, ranks, updates)
  return processes.horovodrun(ranks, python("run_pretraining.py", **flags))


def is_trained(paths: Paths, flags: dict) -> bool:
  """Whether the folder ended a training of these flags on these records."""
  inside = functools.partial(os.path.join, paths.pretrain)
  results = inside(run_folder.EVAL_RESULTS_FILE)
  before = run_folder.last_training(paths.pretrain)
  if not before:
    return False
  updates = before["plan"]["updates"]  # of packed records about the steps
  checkpoint = inside(f"model.ckpt-{updates}")
  files = (results, f"{checkpoint}.index", f"{checkpoint}.json")
  if not all(map(os.path.exists, files)):
    return False
  made = held_flags(paths)
  probs = made.get("masks", {}).get("masked_lm_prob") or ()
  made["masked_lm_prob"] = ":".join(map(str, probs))
  made["bert_config_file"] = flags["bert_config_file"]
  ended = os.path.getmtime(results)
  manifests = (paths.train_manifest, paths.heldout_manifest)
  return (
    json_files.read(results)["global_step"] == updates
    and all(os.path.getmtime(path) < ended for path in manifests)
    and json_files.read(paths.config).items() <= made["bert"].items()
    and all(made.get(name) == value for name, value in flags.items())
  )


def training_results(paths: Paths) -> dict:
  """The results of the newest call that trained; {} without one."""
  path = os.path.join(paths.pretrain, run_folder.TRAINING_RESULTS_FILE)
  return json_files.read(path) if os.path.exists(path) else {}


def fill_mask(paths: Paths) -> list[str]:
  """Lines with what the model says for masked words of held-out text."""
  from interop import inference, model_source, predictions  # load TensorFlow

  source = model_source.find(paths.pretrain)
  model, tokenizer = inference.open_model(source), source.tokenizer()
  known = {*tokenizer.tokens}
  is_known = lambda word: len(word) > 3 and {word, word.lower()} & known
  with open(paths.heldout_text, encoding="utf-8") as f:
    sentences = list(itertools.islice(f, 1000))
  masked = []
  for ids, words in zip(
    tokenizer.encode_batch(sentences), map(str.split, sentences), strict=True
  ):
    places = [i for i, word in enumerate(words) if is_known(word)]
    if places and len(words) > 5 and len(ids) <= SEQ_LENGTH - 2:
      place = places[len(places) // 2]
      text = " ".join([*words[:place], MASK, *words[place + 1 :]])
      masked.append((text, words[place]))
  masked = masked[:: -(-len(masked) // 4) or 1]
  predictor = predictions.Predictor(model, source, top_k=3)
  found = predictor.predict([predictions.Input(text) for text, _ in masked])
  model.close()
  lines = ["", "Held-out sentences: the model's words for [MASK]"] * bool(found)
  for (text, word), made in zip(masked, found, strict=True):
    best = (f"{w['word']} {w['probability']:.0%}" for w in made["masks"][0])
    lines += [
      textwrap.fill(text, 78, initial_indent="  ", subsequent_indent="  "),
      f"    {'   '.join(best)}   (right: {word})",
    ]
  return lines


def screen(
  paths: Paths,
  ranks: int,
  updates: int,
  began: float,
  earlier: dict,
  examples: Sequence[str] = (),
) -> str:
  """The closing text; `earlier`: the `training_results` before this call."""
  read = lambda name: metrics.read_jsonl(os.path.join(paths.pretrain, name))
  evaluations = read(metrics.EVAL_METRICS_FILE)
  before, after = evaluations[0], evaluations[-1]
  counts = lambda manifest: records.Manifest.load(manifest).counts
  entropy = counts(paths.train_manifest)["unigram_entropy"]
  held_out = counts(paths.heldout_manifest)
  trained = training_results(paths)
  speed = reporting.speed_lines(trained) if trained else ""
  if trained == earlier:
    nothing = "nothing was left to train"
    speed = f"{nothing}; an earlier call\n{speed}" if speed else nothing
  step = after["global_step"]
  shown = console.shown
  row = lambda label, key, form: (
    f"  {label:<26}{shown(before[key], form):>10}{shown(after[key], form):>10}"
  )
  following = next_steps.after(paths.pretrain)
  more = pretraining_command(paths, ranks, 2 * max(step, updates))
  return "\n".join(
    [
      "",
      f"Held out: {after['examples']:,} examples of {held_out['documents']:,} "
      f"documents, before and after {step:,} updates",
      f"  {'':<26}{'before':>10}{'after':>10}",
      row("masked LM loss (nats)", "masked_lm_loss", ".3f")
      + f"    unigram entropy {entropy:.3f}",
      row("masked LM accuracy", "masked_lm_accuracy", ".1%"),
      *_next_sentence_rows(row, after, held_out),
      *examples,
      "",
      speed,
      f"all in all {(time.monotonic() - began) / 60:.1f} min",
      "",
      f"checkpoint  {paths.pretrain}/model.ckpt-{step}",
      f"metrics     {paths.pretrain}/{metrics.METRICS_FILE}",
      f"curve       {paths.curve}",
      "",
      *next_steps.lines({**following, "continue training": more}),
    ]
  )


def _next_sentence_rows(row, after: dict, held_out: dict) -> Iterator[str]:
  """Of a folder whose records are pairs, as they were made before 1.1."""
  if "next_sentence_loss" not in after:
    return
  share = held_out["random_next"] / held_out["examples"]
  labels = -sum(p * math.log(p) for p in (share, 1 - share) if p)
  yield (
    row("next sentence loss (nats)", "next_sentence_loss", ".3f")
    + f"    entropy of labels {labels:.3f}"
  )
  yield (
    row("next sentence accuracy", "next_sentence_accuracy", ".1%")
    + f"    more frequent label {max(share, 1.0 - share):.1%}"
  )


def main(given: Settings) -> None:
  """Runs all steps that are not done yet."""
  began = time.monotonic()
  paths = Paths(given.output_dir)
  check_source(paths, given)
  prepare(paths, given)
  vocab_size = records.Manifest.load(paths.train_manifest).tokenizer.vocab_size
  json_files.write(paths.config, {"vocab_size": vocab_size, **MODEL})
  earlier = training_results(paths)
  steps = steps_to_make(paths, given.num_train_steps)
  num_ranks = ranks_here(given.num_ranks)
  plan = (paths, num_ranks, steps)
  before = run_folder.last_training(paths.pretrain)
  if before and is_trained(paths, pretraining_flags(*plan)):
    updates = before["plan"]["updates"]
    print(f"{paths.pretrain}: has made all {updates:,} updates")
  else:
    run(
      f"pre-training on {num_ranks} rank(s)",
      pretraining_command(*plan),
      until="predict:",  # the screen ends with it
    )
  plot_metrics.plot([paths.pretrain], paths.curve)
  print(screen(*plan, began, earlier, fill_mask(paths)))


if __name__ == "__main__":
  run_with(Settings, main)
