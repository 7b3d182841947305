"""Small fine-tuning runs for tests, and their data."""

import functools
import json

import numpy as np
import samples
from absl import flags

import modeling
from common import settings
from config.exchange_config import AllreduceConfig
from config.optimizers import OptimizerConfig
from config.precision import LossScaleConfig
from finetuning import (
  classification,
  embedding,
  finetune,
  multi_label,
  ner,
  squad,
)
from gradients.distributed import Comm

WORDS = [f"w{i}" for i in range(10)]
COLOURS = ["blue", "green", "red"]


def write_sentences(path, count, seed):
  """Sentences of 2 to 12 words; the label says whether "good" is in them."""
  rng = np.random.default_rng(seed)
  lines = ["sentence\tlabel"]
  for number in range(count):
    words = list(rng.choice(WORDS, rng.integers(1, 12)))
    words.insert(rng.integers(len(words) + 1), ("bad", "good")[number % 2])
    lines.append(f"{' '.join(words)}\t{number % 2}")
  path.write_text("\n".join(lines) + "\n")
  return str(path)


def write_sets(path, count, seed):
  """Sentences of 1 to 9 words, whose labels are the colours in them, if any."""
  rng, lines = np.random.default_rng(seed), []
  for _ in range(count):
    colours = [name for name in COLOURS if rng.random() < 0.4]
    words = rng.permutation([*rng.choice(WORDS, rng.integers(1, 7)), *colours])
    row = {"sentence": " ".join(words), "label": colours}
    lines.append(json.dumps(row))
  path.write_text("\n".join(lines) + "\n")
  return str(path)


def write_questions(path, paragraphs, seed, answered=True):
  """Questions whose answer is the number after the word that they ask for.

  Without `answered` every third word asked for is not in the paragraph.
  """
  rng = np.random.default_rng(seed)
  made = []
  for p in range(paragraphs):
    names = rng.permutation(WORDS)[:4]
    numbers = [str(n) for n in rng.integers(100, 999, 4)]
    context = ", ".join(f"{a} {b}" for a, b in zip(names, numbers, strict=True))
    qas = []
    for name, number in zip(names[:3], numbers[:3], strict=True):
      known = answered or len(qas) != 1
      answer = {"text": number, "answer_start": context.index(number)}
      entry = {"id": f"{p}-{name}", "question": f"{name if known else 'zz'}?"}
      entry["answers"] = [answer] if known else []
      qas.append({**entry, "is_impossible": not known})
    made.append({"context": context, "qas": qas})
  path.write_text(json.dumps({"data": [{"paragraphs": made}]}))
  return str(path)


def write_words(path, count, seed):
  """CoNLL's columns of sentences: numbers and the words after them are LOC."""
  rng = np.random.default_rng(seed)
  lines = []
  for _ in range(count):
    for word in rng.choice(WORDS, rng.integers(1, 9)):
      lines.append(f"{word} X O")
      if rng.random() < 0.4:
        lines += [f"{rng.integers(100, 999)} N B-LOC", "ab X I-LOC"]
    lines.append("")
  path.write_text("\n".join(lines) + "\n")
  return str(path)


def write_pairs(path, count, seed):
  """Pairs that share a word; texts occur again, and some have negatives."""
  rng = np.random.default_rng(seed)
  with open(path, "w") as file:
    for number in range(count):
      anchor, *others = rng.choice(WORDS, 4)
      row = {"anchor": f"{anchor} {number % 7}", "positive": f"{anchor} w"}
      row["negative"] = [*others[: number % 3]]
      # The other text has that word, or not.
      row["score"] = number % 2
      row["other"] = f"{(others[0], anchor)[number % 2]} w"
      file.write(json.dumps(row) + "\n")
  return str(path)


def _settings(config_file, vocab_file, output_dir, changes):
  bert = modeling.BertConfig.from_json_file(config_file)
  bert.hidden_dropout_prob = changes.pop("dropout", 0.0)
  bert.attention_probs_dropout_prob = bert.hidden_dropout_prob
  return dict(
    bert=bert,
    optimizer=OptimizerConfig(bias_correction=True),
    loss_scale=LossScaleConfig(**changes.pop("loss_scale", {})),
    allreduce=AllreduceConfig(),
    output_dir=output_dir and str(output_dir),
    vocab_file=vocab_file,
    do_train=True,
    do_eval=False,
    max_seq_length=64,
    train_batch_size=16,
    learning_rate=1e-3,
    num_train_epochs=2.0,
    log_every_steps=1,
    xla="off",  # compiling takes longer than these runs
  )


def classifier(config_file, vocab_file, output_dir, **changes):
  """The task of a small run that learns to find "good"."""
  settings = _settings(config_file, vocab_file, output_dir, changes)
  return multi_label.task_of(
    classification.ClassifierConfig(**{**settings, **changes})
  )


def squad_task(config_file, vocab_file, output_dir, **changes):
  """The task of a small run that learns to find numbers after words."""
  settings = _settings(config_file, vocab_file, output_dir, changes)
  settings |= dict(max_query_length=8, doc_stride=16, n_best_size=5)
  return squad.Squad(squad.SquadConfig(**{**settings, **changes}))


def ner_task(config_file, vocab_file, output_dir, **changes):
  """The task of a small run that learns to find numbers."""
  settings = _settings(config_file, vocab_file, output_dir, changes)
  return ner.Ner(ner.NerConfig(**{**settings, "doc_stride": 16, **changes}))


def multi_label_task(*files, **changes):
  """The task of a small run that learns to find colours."""
  return classifier(*files, **{"multi_label": True, **changes})


def embedder(config_file, vocab_file, output_dir, **changes):
  """The task of a small run that learns which texts share a word."""
  settings = _settings(config_file, vocab_file, output_dir, changes)
  return embedding.Embedding(
    embedding.EmbedderConfig(**{**settings, **changes})
  )


_TASKS = {
  "embed": (embedder, write_pairs, "jsonl", 64, 20),
  "classify": (classifier, write_sentences, "tsv", 64, 20),
  "choose": (multi_label_task, write_sets, "jsonl", 64, 20),
  "answer": (squad_task, write_questions, "json", 16, 4),
  "label": (ner_task, write_words, "txt", 64, 20),
}


def maker(name, folder, vocab_file, **bert):
  """(output folder, **changes) -> task on a.* of `folder`; b.* is held out."""
  _, write, ending, count, held_out = _TASKS[name]
  write(folder / f"a.{ending}", count, 1)
  write(folder / f"b.{ending}", held_out, 2)
  samples.write_config(folder / "config.json", **bert)
  return of_files(name, folder, vocab_file)


def of_files(name, folder, vocab_file):
  """What `maker` returned that wrote the files of `folder`."""
  task, _, ending, *_ = _TASKS[name]
  files = {"train_file": f"{folder}/a.{ending}"}
  files["predict_file"] = f"{folder}/b.{ending}"
  if name != "answer":  # which evaluates on what it predicts
    files["eval_file"] = files["predict_file"]
  config = f"{folder}/config.json"
  return functools.partial(task, config, vocab_file, **files)


def command_line(config_class, **given):
  """The flags of run_classifier.py or another with `given` on it."""
  values = flags.FlagValues()
  settings.define_flags(config_class, values)
  values.mark_as_parsed()
  for name, value in given.items():
    values[name].value, values[name].present = value, 1
  return values


def run(task):
  """Runs in this process; returns the run's result."""
  return finetune.finetune(task, Comm())
