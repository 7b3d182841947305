"""Fine-tunes a BERT folder with Hugging Face's transformers and PyTorch.

  .build/transformers/bin/python benchmarks/peers/transformers_finetune.py \\
    --task=squad --model=FOLDER --train_file=train.json --dev_file=dev.json

Runs in an environment of its own (requirements.txt) and imports
nothing of this project. Follows what transformers' examples run_glue_no_trainer
and run_qa_no_trainer do, with the Trainer's clipping: AdamW with weight decay
on weights only, a linear schedule with warm-up and decay, batches padded to
their longest example. A classifier's files are TSV with the header
sentence<TAB>label; a squad's are SQuAD v1.1. Like there, --doc_stride is how
many tokens two windows share, not the step between them (google/bert's).

Prints one JSON line. With --serve, trains --updates_per_round updates for each
line on stdin and answers with their seconds, for timing in turns with another
process.
"""

import argparse
import csv
import itertools
import json
import math
import sys
import time

import torch
import transformers
import transformers_squad

# Not counted in examples_per_s: memory and kernels are found in these.
WARM_UPDATES = 3
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--task", choices=["classifier", "squad"], required=True)
  parser.add_argument("--model", required=True, help="a Hugging Face folder")
  parser.add_argument("--train_file", required=True)
  parser.add_argument("--dev_file")
  parser.add_argument("--test_file")
  parser.add_argument("--max_seq_length", type=int, default=128)
  parser.add_argument("--doc_stride", type=int, default=128)
  parser.add_argument("--n_best", type=int, default=20)
  parser.add_argument("--max_answer_length", type=int, default=30)
  parser.add_argument("--batch", type=int, default=32)
  parser.add_argument("--learning_rate", type=float, default=5e-5)
  parser.add_argument("--warmup_proportion", type=float, default=0.1)
  parser.add_argument("--epochs", type=int, default=3)
  parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
  parser.add_argument(
    "--eval_precision", choices=["fp32", "bf16"], help="default: --precision"
  )
  parser.add_argument("--seed", type=int, default=1)
  parser.add_argument("--threads", type=int, default=torch.get_num_threads())
  parser.add_argument("--output_dir", help="where to save the trained model")
  parser.add_argument("--serve", action="store_true")
  parser.add_argument("--updates_per_round", type=int, default=4)
  arguments = parser.parse_args()
  arguments.eval_precision = arguments.eval_precision or arguments.precision
  return arguments


def autocast(precision: str):
  return torch.autocast(
    "cpu", dtype=torch.bfloat16, enabled=precision == "bf16"
  )


def predict(model, features: list, arguments, tokenizer):
  """Yields the model's output for each batch of `features` in their order."""
  loader = torch.utils.data.DataLoader(
    [{k: f[k] for k in tokenizer.model_input_names} for f in features],
    arguments.batch,
    collate_fn=transformers.DataCollatorWithPadding(tokenizer),
  )
  model.eval()
  for batch in loader:
    with torch.inference_mode(), autocast(arguments.eval_precision):
      yield model(**batch)


class Classifier:
  """A task of one sentence and its label; the labels are the train file's."""

  model_class = transformers.AutoModelForSequenceClassification

  def __init__(self, arguments, tokenizer):
    self._arguments, self._tokenizer = arguments, tokenizer
    rows = self._rows(arguments.train_file)
    self._labels = sorted({label for _, label in rows})
    self.model_settings = {"num_labels": len(self._labels)}
    self.train = self._features(arguments.train_file, rows)

  def _rows(self, path: str) -> list:
    """(sentence, label) of each line."""
    with open(path, encoding="utf-8", newline="") as f:
      rows = list(csv.reader(f, delimiter="\t", quoting=csv.QUOTE_NONE))
    if not rows or rows.pop(0) != ["sentence", "label"]:
      raise SystemExit(f"error: {path} does not begin with sentence<TAB>label")
    if not rows:
      raise SystemExit(f"error: {path} has no examples; give another file")
    for number, row in enumerate(rows, 2):
      if len(row) != 2:
        raise SystemExit(
          f"error: {path}:{number} has {len(row)} columns, not 2"
        )
    return rows

  def _features(self, path: str, rows: list) -> list:
    unknown = {label for _, label in rows} - set(self._labels)
    if unknown:
      raise SystemExit(
        f"error: {path} has labels {sorted(unknown)} that "
        f"{self._arguments.train_file} does not have"
      )
    encoding = self._tokenizer(
      [sentence for sentence, _ in rows],
      truncation=True,
      max_length=self._arguments.max_seq_length,
    )
    return [
      {
        **{name: column[i] for name, column in encoding.items()},
        "labels": self._labels.index(label),
      }
      for i, (_, label) in enumerate(rows)
    ]

  def evaluate(self, model, path: str) -> dict:
    features = self._features(path, self._rows(path))
    outputs = predict(model, features, self._arguments, self._tokenizer)
    found = torch.cat([output.logits.argmax(-1) for output in outputs])
    right = torch.tensor([feature["labels"] for feature in features])
    accuracy = (found == right).float().mean().item()
    return {"examples": len(features), "accuracy": round(accuracy, 5)}


class Squad:
  """SQuAD v1.1: the span of an answer in windows of its context."""

  model_class = transformers.AutoModelForQuestionAnswering

  def __init__(self, arguments, tokenizer):
    self._arguments, self._tokenizer = arguments, tokenizer
    self.model_settings = {}
    questions = transformers_squad.read_questions(arguments.train_file)
    self.train = []
    for feature in self._windows(questions):
      # The first of the answers, as in the examples.
      answer = questions[feature.pop("question")].answers[0]
      positions = transformers_squad.answer_positions(
        feature.pop("offsets"), answer
      )
      feature["start_positions"], feature["end_positions"] = positions
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
    found = [[] for _ in questions]
    rows = (
      row
      for output in predict(model, windows, self._arguments, self._tokenizer)
      for row in zip(
        output.start_logits.tolist(), output.end_logits.tolist(), strict=True
      )
    )
    for window, (starts, ends) in zip(windows, rows, strict=True):
      # Without the padding's logits.
      length = len(window["offsets"])
      logits = starts[:length], ends[:length]
      found[window["question"]].append((window["offsets"], *logits))
    predictions = [
      transformers_squad.best_answer(
        of_question,
        question.context,
        self._arguments.n_best,
        self._arguments.max_answer_length,
      )
      for of_question, question in zip(found, questions, strict=True)
    ]
    counts = {"examples": len(questions), "windows": len(windows)}
    return {**counts, **transformers_squad.scores(predictions, questions)}


class Training:
  """A model, its optimizer and its batches, shuffled anew in each epoch."""

  def __init__(self, arguments, task, tokenizer):
    # Before the model: the weights of a new head are random.
    transformers.set_seed(arguments.seed)
    self.model = task.model_class.from_pretrained(
      arguments.model, **task.model_settings
    ).train()
    self._precision = arguments.precision
    self._loader = torch.utils.data.DataLoader(
      task.train,
      arguments.batch,
      shuffle=True,
      collate_fn=transformers.DataCollatorWithPadding(tokenizer),
      generator=torch.Generator().manual_seed(arguments.seed),
    )
    self.updates = arguments.epochs * len(self._loader)
    self._optimizer = self._make_optimizer(arguments.learning_rate)
    self._schedule = transformers.get_linear_schedule_with_warmup(
      self._optimizer,
      math.ceil(arguments.warmup_proportion * self.updates),
      self.updates,
    )
    epochs = itertools.repeat(self._loader)
    self._batches = itertools.chain.from_iterable(epochs)

  def _make_optimizer(self, learning_rate: float):
    decayed, rest = [], []
    for name, parameter in self.model.named_parameters():
      plain = name.endswith("bias") or "LayerNorm" in name
      (rest if plain else decayed).append(parameter)
    groups = [
      {"params": decayed, "weight_decay": WEIGHT_DECAY},
      {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, fused=True)

  def update(self) -> dict:
    """One update, with the making of its batch: seconds, loss, its shape."""
    began = time.perf_counter()
    batch = next(self._batches)
    with autocast(self._precision):
      loss = self.model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
    self._optimizer.step()
    self._schedule.step()
    self._optimizer.zero_grad(set_to_none=True)
    return {
      "loss": loss.item(),
      "seconds": time.perf_counter() - began,
      "shape": list(batch["input_ids"].shape),
    }


def train(training) -> dict:
  """All updates; their seconds and how many examples a second they took."""
  done = []
  for number in range(1, training.updates + 1):
    done.append(training.update())
    if number % 25 == 0 or number == training.updates:
      seconds = sum(update["seconds"] for update in done)
      left = seconds / number * (training.updates - number)
      print(
        f"update {number} of {training.updates}, loss {done[-1]['loss']:.4f}, "
        f"{seconds:.0f} s, {left:.0f} s left",
        file=sys.stderr,
      )
  steady = done[WARM_UPDATES:] or done
  seconds = sum(update["seconds"] for update in steady)
  examples = sum(update["shape"][0] for update in steady)
  return {
    "updates": len(done),
    "loop_seconds": round(sum(update["seconds"] for update in done), 2),
    "steady_seconds": round(seconds, 2),
    "examples_per_s": round(examples / seconds, 2) if done else 0.0,
    "last_losses": round(
      sum(update["loss"] for update in done[-25:]) / max(1, len(done[-25:])), 4
    ),
  }


def serve(training, updates_per_round: int) -> None:
  """Answers each line with the seconds of so many updates and their shapes."""
  for _ in range(WARM_UPDATES):
    training.update()
  versions = make_versions()
  print(json.dumps({"ready": True, **versions}), flush=True)
  for _ in sys.stdin:
    done = [training.update() for _ in range(updates_per_round)]
    answer = {name: [u[name] for u in done] for name in ("seconds", "shape")}
    print(json.dumps(answer), flush=True)


def make_versions() -> dict:
  return {
    "torch": torch.__version__,
    "transformers": transformers.__version__,
  }


def run(arguments) -> None:
  began = time.perf_counter()
  torch.set_num_threads(arguments.threads)
  transformers.utils.logging.disable_progress_bar()
  tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
  tasks = {"classifier": Classifier, "squad": Squad}
  task = tasks[arguments.task](arguments, tokenizer)
  training = Training(arguments, task, tokenizer)
  if arguments.serve:
    serve(training, arguments.updates_per_round)
    return
  result = {"examples": len(task.train), **train(training)}
  if arguments.output_dir:
    training.model.save_pretrained(arguments.output_dir)
    tokenizer.save_pretrained(arguments.output_dir)
  for part in ("dev", "test"):
    path = getattr(arguments, f"{part}_file")
    if path:
      result[part] = task.evaluate(training.model, path)
  result["total_seconds"] = round(time.perf_counter() - began, 2)
  settings = {"settings": vars(arguments), **make_versions()}
  print(json.dumps({**result, **settings}), flush=True)


def main() -> None:
  try:
    run(parse_arguments())
  except OSError as e:
    raise SystemExit(f"error: {e}") from e


if __name__ == "__main__":
  main()
