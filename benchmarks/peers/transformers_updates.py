"""Hugging Face's side of compare.py: PyTorch's updates of transformers' models.

  .build/transformers/bin/python benchmarks/peers/transformers_updates.py \\
    --model=FOLDER

Runs in an environment of its own (requirements.txt) and imports nothing of this
project but what stands beside it. Answers each line on stdin with the seconds
of some updates.

The class that config.json names (BertForPreTraining, ModernBertForMaskedLM)
trains on one batch. It computes the vocabulary's logits of every position, ours
of the masked ones only, and so does it with --sparse.
"""

import argparse
import functools
import inspect
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


def timed(update, count: int) -> list[float]:
  """Seconds of each of `count` updates."""
  seconds = []
  for _ in range(count):
    began = time.perf_counter()
    update()
    seconds.append(time.perf_counter() - began)
  return seconds


def peak_memory_mb() -> int:
  """Peak of this process, or of tensors on a GPU, in MB of 2^20 bytes."""
  if DEVICE == "cuda":
    return torch.cuda.max_memory_allocated() >> 20
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", required=True, help="a Hugging Face folder")
  parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
  parser.add_argument("--batch", type=int, default=8)
  parser.add_argument("--max_seq_length", type=int, default=128)
  parser.add_argument("--updates_per_round", type=int, default=4)
  parser.add_argument("--compile", action="store_true")
  parser.add_argument("--sparse", action="store_true")
  parser.add_argument("--predictions", type=int, default=20)
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


def update_of(arguments) -> Callable[[], float]:
  """The update, always on the same batch."""
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


def main() -> None:
  arguments = parse_arguments()
  update = update_of(arguments)
  timed(update, WARM_UPDATES)
  turns.serve(
    lambda: {"seconds": timed(update, arguments.updates_per_round)}, **VERSIONS
  )
  print(json.dumps({"peak_memory_mb": peak_memory_mb()}))


if __name__ == "__main__":
  main()
