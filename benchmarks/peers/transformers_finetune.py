"""Fine-tunes a BERT folder with Hugging Face's transformers and PyTorch.

  .build/transformers/bin/python benchmarks/peers/transformers_finetune.py \\
    --task=squad --model=FOLDER --train_file=train.json --dev_file=dev.json

Runs in an environment of its own (requirements.txt) and imports nothing of
this project but what stands beside it. Follows what transformers' examples
run_glue_no_trainer, run_qa_no_trainer and run_ner_no_trainer do, with the
Trainer's clipping: a linear schedule with warm-up and decay, batches padded to
their longest example.
A classifier's files are TSV with the header sentence<TAB>label; a squad's are
SQuAD v1.1; an ner's are CoNLL's columns, the word first and its label last.
Like there, --doc_stride is how many tokens two windows share, not the step
between them (google/bert's).

Prints one JSON line. With --serve, trains some updates for each line on stdin
and answers with their seconds, for timing in turns with another process.
"""

import argparse
import csv
import itertools
import json
import math

import torch
import torch_training
import transformers
import transformers_ner
import transformers_squad
import turns

WARMUP_PROPORTION = 0.1
UPDATES_PER_ROUND = 5


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--task", choices=[*TASKS], required=True)
  parser.add_argument("--model", required=True, help="a Hugging Face folder")
  parser.add_argument("--train_file", required=True)
  parser.add_argument("--dev_file")
  parser.add_argument("--test_file")
  parser.add_argument("--max_seq_length", type=int, default=128)
  parser.add_argument("--doc_stride", type=int, default=128)
  parser.add_argument("--batch", type=int, default=32)
  parser.add_argument("--learning_rate", type=float, default=5e-5)
  parser.add_argument("--epochs", type=int, default=3)
  parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
  parser.add_argument("--seed", type=int, default=1)
  parser.add_argument("--serve", action="store_true")
  return parser.parse_args()


def predict(model, features: list, arguments, tokenizer):
  """Yields the model's output for each batch of `features` in their order."""
  loader = torch.utils.data.DataLoader(
    [{k: f[k] for k in tokenizer.model_input_names} for f in features],
    arguments.batch,
    collate_fn=transformers.DataCollatorWithPadding(tokenizer),
  )
  model.eval()
  for batch in loader:
    autocast = torch_training.autocast(arguments.precision)
    with torch.inference_mode(), autocast:
      yield model(**batch)


class Classifier:
  """A task of one sentence and its label; the labels are the train file's."""

  model_class = transformers.AutoModelForSequenceClassification
  collator = transformers.DataCollatorWithPadding

  def __init__(self, arguments, tokenizer):
    self._arguments, self._tokenizer = arguments, tokenizer
    rows = self._rows(arguments.train_file)
    self._labels = sorted({row["label"] for row in rows})
    self.model_settings = {"num_labels": len(self._labels)}
    self.train = self._features(rows)

  def _rows(self, path: str) -> list[dict]:
    with open(path, encoding="utf-8", newline="") as f:
      return [*csv.DictReader(f, delimiter="\t", quoting=csv.QUOTE_NONE)]

  def _features(self, rows: list) -> list:
    encoding = self._tokenizer(
      [row["sentence"] for row in rows],
      truncation=True,
      max_length=self._arguments.max_seq_length,
    )
    return [
      {
        **{name: column[i] for name, column in encoding.items()},
        "labels": self._labels.index(row["label"]),
      }
      for i, row in enumerate(rows)
    ]

  def evaluate(self, model, path: str) -> dict:
    features = self._features(self._rows(path))
    outputs = predict(model, features, self._arguments, self._tokenizer)
    found = torch.cat([output.logits.argmax(-1) for output in outputs])
    right = torch.tensor([feature["labels"] for feature in features])
    accuracy = (found == right).float().mean().item()
    return {"examples": len(features), "accuracy": round(accuracy, 5)}


class Squad:
  """SQuAD v1.1: the span of an answer in windows of its context."""

  model_class = transformers.AutoModelForQuestionAnswering
  collator = transformers.DataCollatorWithPadding
  model_settings: dict = {}

  def __init__(self, arguments, tokenizer):
    self._arguments, self._tokenizer = arguments, tokenizer
    questions = transformers_squad.read_questions(arguments.train_file)
    self.train = []
    for feature in self._windows(questions):
      # The first of the answers, as in the examples.
      answer = questions[feature.pop("question")].answers[0]
      feature["start_positions"], feature["end_positions"] = (
        transformers_squad.answer_positions(feature.pop("offsets"), answer)
      )
      self.train.append(feature)

  def _windows(self, questions: list) -> list:
    """Features with the "question" they are of and their "offsets"."""
    encoding = self._tokenizer(
      [question.text for question in questions],
      [question.context for question in questions],
      truncation="only_second",
      max_length=self._arguments.max_seq_length,
      stride=self._arguments.doc_stride,
      return_overflowing_tokens=True,
      return_offsets_mapping=True,
    )
    windows = []
    for i, number in enumerate(encoding["overflow_to_sample_mapping"]):
      names = self._tokenizer.model_input_names
      window = {name: encoding[name][i] for name in names}
      window["question"] = number
      pairs = zip(
        encoding["offset_mapping"][i], encoding.sequence_ids(i), strict=True
      )
      window["offsets"] = [o if text == 1 else None for o, text in pairs]
      windows.append(window)
    return windows

  def evaluate(self, model, path: str) -> dict:
    questions = transformers_squad.read_questions(path)
    windows = self._windows(questions)
    starts, ends = [], []
    for output in predict(model, windows, self._arguments, self._tokenizer):
      starts += output.start_logits.tolist()
      ends += output.end_logits.tolist()
    found = [[] for _ in questions]
    for window, start, end in zip(windows, starts, ends, strict=True):
      # Without the padding's logits.
      length = len(window["offsets"])
      logits = start[:length], end[:length]
      found[window["question"]].append((window["offsets"], *logits))
    predictions = [
      transformers_squad.best_answer(of_question, question.context)
      for of_question, question in zip(found, questions, strict=True)
    ]
    counts = {"examples": len(questions), "windows": len(windows)}
    return {**counts, **transformers_squad.scores(predictions, questions)}


class Ner:
  """A label for each given word, at its first token; long sentences are cut."""

  model_class = transformers.AutoModelForTokenClassification
  collator = transformers.DataCollatorForTokenClassification

  def __init__(self, arguments, tokenizer):
    self._arguments, self._tokenizer = arguments, tokenizer
    sentences = transformers_ner.read_sentences(arguments.train_file)
    self._labels = sorted({tag for _, tags in sentences for tag in tags})
    self.model_settings = {"num_labels": len(self._labels)}
    self.train = [
      {**self._encoded(words), "labels": self._targets(words, tags)}
      for words, tags in sentences
    ]

  def _encoded(self, words: list):
    return self._tokenizer(
      words,
      is_split_into_words=True,
      truncation=True,
      max_length=self._arguments.max_seq_length,
    )

  def _firsts(self, words: list) -> list:
    """For each token the word whose first token it is, else None."""
    numbers = self._encoded(words).word_ids()
    pairs = zip(numbers, [None, *numbers], strict=False)
    return [word if word != before else None for word, before in pairs]

  def _targets(self, words: list, tags: list) -> list:
    return [
      -100 if word is None else self._labels.index(tags[word])
      for word in self._firsts(words)
    ]

  def evaluate(self, model, path: str) -> dict:
    sentences = transformers_ner.read_sentences(path)
    features = [self._encoded(words) for words, _ in sentences]
    found = []
    for output in predict(model, features, self._arguments, self._tokenizer):
      found += output.logits.argmax(-1).tolist()
    predictions = []
    for (words, _), numbers in zip(sentences, found, strict=True):
      tags = ["O"] * len(words)  # also of words that are cut or have no token
      firsts = self._firsts(words)
      for word, number in zip(firsts, numbers[: len(firsts)], strict=True):
        if word is not None:
          tags[word] = self._labels[number]
      predictions.append(tags)
    right = [tags for _, tags in sentences]
    return {
      "examples": len(sentences),
      **transformers_ner.scores(right, predictions),
    }


TASKS = {"classifier": Classifier, "squad": Squad, "ner": Ner}


class Training:
  """A model, its optimizer and its batches, shuffled anew in each epoch."""

  def __init__(self, arguments, task, tokenizer):
    # Before the model: the weights of a new head are random.
    transformers.set_seed(arguments.seed)
    self.model = task.model_class.from_pretrained(
      arguments.model, **task.model_settings
    ).train()
    loader = torch.utils.data.DataLoader(
      task.train,
      arguments.batch,
      shuffle=True,
      collate_fn=task.collator(tokenizer),
      generator=torch.Generator().manual_seed(arguments.seed),
    )
    self.updates = arguments.epochs * len(loader)
    self._batches = itertools.chain.from_iterable(itertools.repeat(loader))
    self._update = torch_training.Updates(
      self.model, arguments.precision, lr=arguments.learning_rate
    )
    self._update.schedule = transformers.get_linear_schedule_with_warmup(
      self._update.optimizer,
      math.ceil(WARMUP_PROPORTION * self.updates),
      self.updates,
    )
    self.losses = []

  def update(self) -> int:
    """One update, with the making of its batch; its number of examples."""
    batch = next(self._batches)
    self.losses.append(self._update(batch))
    return len(batch["input_ids"])


def train(training: Training) -> dict:
  """All updates; how fast they were, and the last losses."""
  warm = min(torch_training.WARM_UPDATES, training.updates)
  torch_training.timed(training.update, warm)
  steady = torch_training.timed(training.update, training.updates - warm)
  seconds, last = sum(steady["seconds"]), training.losses[-25:]
  return {
    "updates": training.updates,
    "steady_seconds": round(seconds, 2),
    "examples_per_s": round(sum(steady["examples"]) / seconds, 2),
    "last_losses": round(sum(last) / len(last), 4),
  }


def main() -> None:
  arguments = parse_arguments()
  tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
  task = TASKS[arguments.task](arguments, tokenizer)
  training = Training(arguments, task, tokenizer)
  if arguments.serve:
    torch_training.timed(training.update, torch_training.WARM_UPDATES)
    turns.serve(
      lambda: torch_training.timed(training.update, UPDATES_PER_ROUND),
      **torch_training.VERSIONS,
    )
    return
  result = {"examples": len(task.train), **train(training)}
  for part in ("dev", "test"):
    if path := getattr(arguments, f"{part}_file"):
      result[part] = task.evaluate(training.model, path)
  about = {"settings": vars(arguments), **torch_training.VERSIONS}
  print(json.dumps({**result, **about}))


if __name__ == "__main__":
  main()
