"""Hugging Face's side of compare.py: PyTorch's updates of transformers' models.

  .build/transformers/bin/python benchmarks/peers/transformers_updates.py \\
    --task=step --model=FOLDER

Runs in an environment of its own (requirements.txt) and imports nothing of this
project but what stands beside it. Answers each line on stdin with the seconds
of some updates.

`step` is pre-training: the class that config.json names (BertForPreTraining,
ModernBertForMaskedLM) on one batch. It computes the vocabulary's logits of
every position, ours of the masked ones only, and so does it with --sparse.
`classifier` (a TSV file with the columns sentence and label) and `squad` (SQuAD
v1.1) are as transformers' examples run_glue_no_trainer and run_qa_no_trainer
prepare them. Batches are shuffled, and padded to their longest example.
"""

import argparse
import csv
import functools
import inspect
import itertools
import json
import resource
import time
import types
from collections.abc import Callable

import torch
import transformers
import turns

IGNORED_LABEL = -100
WARM_UPDATES = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VERSIONS = {
  "torch": torch.__version__,
  "transformers": transformers.__version__,
}


class Updates:
  """What transformers' Trainer does in an update.

  PyTorch's fused AdamW with weight decay on weights only, clipping by norm 1.
  """

  def __init__(self, model, precision: str, **settings):
    """`settings` are AdamW's."""
    self._model, self._precision = model, precision
    self.forward = model
    decayed, rest = [], []
    for name, parameter in model.named_parameters():
      plain = name.endswith("bias") or "norm" in name.lower()
      (rest if plain else decayed).append(parameter)
    groups = [
      {"params": decayed, "weight_decay": 0.01},
      {"params": rest, "weight_decay": 0.0},
    ]
    self.optimizer = torch.optim.AdamW(groups, fused=True, **settings)

  def __call__(self, batch) -> float:
    """Makes an update; returns the loss."""
    bf16 = self._precision == "bf16"
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=bf16):
      loss = self.forward(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
    self.optimizer.step()
    self.optimizer.zero_grad(set_to_none=True)
    return loss.item()


def timed(update, count: int) -> dict:
  """Seconds of `count` updates, and the examples that each returns."""
  seconds, examples = [], []
  for _ in range(count):
    began = time.perf_counter()
    examples.append(update())
    seconds.append(time.perf_counter() - began)
  return {"seconds": seconds, "examples": examples}


def peak_memory_mb() -> int:
  """Peak of this process, or of tensors on a GPU, in MB of 2^20 bytes."""
  if DEVICE == "cuda":
    return torch.cuda.max_memory_allocated() >> 20
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--task", choices=[*TASKS], default="step")
  parser.add_argument("--model", required=True, help="a Hugging Face folder")
  parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
  parser.add_argument("--batch", type=int, default=8)
  parser.add_argument("--max_seq_length", type=int, default=128)
  parser.add_argument("--updates_per_round", type=int, default=4)
  parser.add_argument("--compile", action="store_true")
  parser.add_argument("--sparse", action="store_true")
  parser.add_argument("--predictions", type=int, default=20)
  parser.add_argument("--train_file", help="what fine-tuning trains on")
  return parser.parse_args()


def make_batch(config, batch: int, seq_length: int, predictions: int) -> dict:
  """Full sequences of random tokens, `predictions` of each masked."""
  generator = torch.Generator().manual_seed(0)
  ids = torch.randint(
    0, config.vocab_size, (batch, seq_length), generator=generator
  )
  labels = torch.full_like(ids, IGNORED_LABEL)
  labels[:, 1 : predictions + 1] = ids[:, 1 : predictions + 1]
  return {
    "input_ids": ids,
    "attention_mask": torch.ones_like(ids),
    "token_type_ids": torch.zeros_like(ids),
    "labels": labels,
    "next_sentence_label": torch.zeros(batch, dtype=torch.long),
  }


class MaskedOnly(torch.nn.Module):
  """BertForPreTraining with logits of the masked tokens only.

  What ModernBERT does if its config has `sparse_prediction`.
  """

  def __init__(self, model):
    super().__init__()
    self.model = model

  def forward(self, input_ids, token_type_ids, positions, labels, next_labels):
    """`positions` of masked tokens in the flat batch, and their `labels`."""
    tokens, pooled = self.model.bert(
      input_ids, token_type_ids=token_type_ids, return_dict=False
    )
    masked = tokens.flatten(0, 1)[positions]
    scores, related = self.model.cls(masked, pooled)
    cross_entropy = torch.nn.functional.cross_entropy
    loss = cross_entropy(scores, labels) + cross_entropy(related, next_labels)
    return types.SimpleNamespace(loss=loss)


def masked_only(batch: dict) -> dict:
  """A batch as `MaskedOnly` takes it."""
  labels = batch["labels"].flatten()
  (positions,) = torch.nonzero(labels != IGNORED_LABEL, as_tuple=True)
  return {
    "input_ids": batch["input_ids"],
    "token_type_ids": batch["token_type_ids"],
    "positions": positions,
    "labels": labels[positions],
    "next_labels": batch["next_sentence_label"],
  }


def pretraining(arguments) -> Callable[[], int | None]:
  """The update of `step`: always of the same batch."""
  config = transformers.AutoConfig.from_pretrained(arguments.model)
  if arguments.sparse:
    config.sparse_prediction = True
  torch.manual_seed(0)
  model = getattr(transformers, config.architectures[0])(config).train()
  model.to(DEVICE)
  updates = Updates(model, arguments.precision, lr=1e-4, eps=1e-6)
  batch = make_batch(
    config, arguments.batch, arguments.max_seq_length, arguments.predictions
  )
  if arguments.sparse and hasattr(model, "bert"):
    updates.forward, batch = MaskedOnly(model), masked_only(batch)
  known = inspect.signature(updates.forward.forward).parameters
  batch = {name: t.to(DEVICE) for name, t in batch.items() if name in known}
  if arguments.compile:
    updates.forward = torch.compile(updates.forward)
  return functools.partial(updates, batch)


def sentences(arguments, tokenizer):
  """A classifier with the labels of the train file, and its features."""
  with open(arguments.train_file, encoding="utf-8", newline="") as f:
    rows = [*csv.DictReader(f, delimiter="\t", quoting=csv.QUOTE_NONE)]
  labels = sorted({row["label"] for row in rows})
  model = transformers.AutoModelForSequenceClassification.from_pretrained(
    arguments.model, num_labels=len(labels)
  )
  encoding = tokenizer(
    [row["sentence"] for row in rows],
    truncation=True,
    max_length=arguments.max_seq_length,
  )
  features = []
  for i, row in enumerate(rows):
    feature = {name: column[i] for name, column in encoding.items()}
    features.append({**feature, "labels": labels.index(row["label"])})
  return model, features


def questions(arguments, tokenizer):
  """A model of spans, and windows of paragraphs with their first answers."""
  with open(arguments.train_file, encoding="utf-8") as f:
    articles = json.load(f)["data"]
  texts, contexts, answers = [], [], []
  for paragraph in itertools.chain(*(a["paragraphs"] for a in articles)):
    for qa in paragraph["qas"]:
      # Spaces in front can fill a window; the examples drop them, too.
      texts.append(qa["question"].lstrip())
      contexts.append(paragraph["context"])
      answers.append(qa["answers"][0])
  encoding = tokenizer(
    texts,
    contexts,
    truncation="only_second",
    max_length=arguments.max_seq_length,
    stride=128,
    return_overflowing_tokens=True,
    return_offsets_mapping=True,
  )
  features = []
  for i, number in enumerate(encoding["overflow_to_sample_mapping"]):
    first = answers[number]["answer_start"]
    past = first + len(answers[number]["text"])
    # [CLS] unless the window holds the whole answer.
    start, end = (
      encoding.char_to_token(i, at, sequence_index=1) or 0
      for at in (first, past - 1)
    )
    feature = {n: encoding[n][i] for n in tokenizer.model_input_names}
    inside = bool(start and end)
    feature["start_positions"] = start * inside
    features.append({**feature, "end_positions": end * inside})
  model = transformers.AutoModelForQuestionAnswering
  return model.from_pretrained(arguments.model), features


def finetuning(prepare, arguments) -> Callable[[], int]:
  """The update of a fine-tuning, with the making of its batch."""
  transformers.set_seed(1)
  tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
  model, features = prepare(arguments, tokenizer)
  loader = torch.utils.data.DataLoader(
    features,
    arguments.batch,
    shuffle=True,
    collate_fn=transformers.DataCollatorWithPadding(tokenizer),
    generator=torch.Generator().manual_seed(1),
  )
  batches = itertools.chain.from_iterable(itertools.repeat(loader))
  updates = Updates(model.train(), arguments.precision, lr=5e-5)

  def update() -> int:
    batch = next(batches)
    updates(batch)
    return len(batch["input_ids"])

  return update


TASKS = {
  "step": pretraining,
  "classifier": functools.partial(finetuning, sentences),
  "squad": functools.partial(finetuning, questions),
}


def main() -> None:
  arguments = parse_arguments()
  update = TASKS[arguments.task](arguments)
  timed(update, WARM_UPDATES)

  def answer() -> dict:
    result = timed(update, arguments.updates_per_round)
    if arguments.task == "step":
      del result["examples"]
    return result

  turns.serve(answer, **VERSIONS)
  print(json.dumps({"peak_memory_mb": peak_memory_mb()}))


if __name__ == "__main__":
  main()
