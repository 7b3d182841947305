"""Times Hugging Face's training step; compare_transformers.py runs it.

Runs in an environment of its own (requirements.txt). BertForPreTraining in
train mode, with `torch_training`'s update: what the training step of
run_pretraining.py does. It computes the vocabulary's logits of every position,
ours of the masked ones only.
"""

import argparse
import functools
import json

import torch
import torch_training
import transformers
import turns

IGNORED_LABEL = -100


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--bert_config_file", required=True)
  parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
  parser.add_argument("--compile", action="store_true")
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


def main() -> None:
  arguments = parse_arguments()
  with open(arguments.bert_config_file, encoding="utf-8") as f:
    config = transformers.BertConfig(**json.load(f))
  torch.manual_seed(0)
  model = transformers.BertForPreTraining(config).train()
  updates = torch_training.Updates(
    model, arguments.precision, lr=1e-4, eps=1e-6
  )
  if arguments.compile:
    updates.forward = torch.compile(model)
  batch = make_batch(
    config, arguments.batch, arguments.seq_length, arguments.predictions
  )
  update = functools.partial(updates, batch)
  torch_training.timed(update, torch_training.WARM_UPDATES)
  turns.serve(
    lambda: torch_training.timed(update, arguments.updates_per_round),
    **torch_training.VERSIONS,
  )


if __name__ == "__main__":
  main()
