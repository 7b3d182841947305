"""Times Hugging Face's training step; compare_transformers.py runs it.

Runs in an environment of its own (requirements.txt). The class that config.json
names (BertForPreTraining, ModernBertForMaskedLM) in train mode, with
`torch_training`'s update: what the training step of run_pretraining.py does.
It computes the vocabulary's logits of every position, ours of the masked ones
only, and so does ModernBERT with --sparse.
"""

import argparse
import functools
import inspect
import json
import types

import torch
import torch_training
import transformers
import turns

IGNORED_LABEL = -100


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", required=True, help="folder with config.json")
  parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
  parser.add_argument("--compile", action="store_true")
  parser.add_argument("--sparse", action="store_true")
  parser.add_argument("--batch", type=int, default=8)
  parser.add_argument("--seq_length", type=int, default=128)
  parser.add_argument("--predictions", type=int, default=20)
  parser.add_argument("--updates_per_round", type=int, default=4)
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


def main() -> None:
  arguments = parse_arguments()
  config = transformers.AutoConfig.from_pretrained(arguments.model)
  if arguments.sparse:
    config.sparse_prediction = True
  torch.manual_seed(0)
  model = getattr(transformers, config.architectures[0])(config).train()
  model.to(torch_training.DEVICE)
  updates = torch_training.Updates(
    model, arguments.precision, lr=1e-4, eps=1e-6
  )
  batch = make_batch(
    config, arguments.batch, arguments.seq_length, arguments.predictions
  )
  if arguments.sparse and hasattr(model, "bert"):
    updates.forward, batch = MaskedOnly(model), masked_only(batch)
  known = inspect.signature(updates.forward.forward).parameters
  batch = {
    name: tensor.to(torch_training.DEVICE)
    for name, tensor in batch.items()
    if name in known
  }
  if arguments.compile:
    updates.forward = torch.compile(updates.forward)
  update = functools.partial(updates, batch)
  torch_training.timed(update, torch_training.WARM_UPDATES)
  turns.serve(
    lambda: torch_training.timed(update, arguments.updates_per_round),
    **torch_training.VERSIONS,
  )
  print(json.dumps({"peak_memory_mb": torch_training.peak_memory_mb()}))


if __name__ == "__main__":
  main()
