"""Times Hugging Face's training step; compare_transformers.py runs it.

Runs in an environment of its own (requirements.txt) and imports
nothing of this project. BertForPreTraining in train mode, PyTorch's fused
AdamW (what transformers' Trainer takes), weight decay on weights only, clipping
by norm 1: what the training step of run_pretraining.py does. It computes the
vocabulary's logits of every position, ours of the masked ones only.
"""

import argparse
import contextlib
import json
import sys
import time

import torch
import transformers

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
  parser.add_argument("--threads", type=int, default=torch.get_num_threads())
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


def make_step(arguments):
  """A function that does one update and returns its loss."""
  with open(arguments.bert_config_file, encoding="utf-8") as f:
    config = transformers.BertConfig(**json.load(f))
  torch.manual_seed(0)
  model = transformers.BertForPreTraining(config).train()
  decayed, rest = [], []
  for name, parameter in model.named_parameters():
    plain = name.endswith("bias") or "LayerNorm" in name
    (rest if plain else decayed).append(parameter)
  optimizer = torch.optim.AdamW(
    [
      {"params": decayed, "weight_decay": 0.01},
      {"params": rest, "weight_decay": 0.0},
    ],
    lr=1e-4,
    eps=1e-6,
    fused=True,
  )
  forward = torch.compile(model) if arguments.compile else model
  batch = make_batch(
    config, arguments.batch, arguments.seq_length, arguments.predictions
  )

  def step() -> float:
    precision = (
      torch.autocast("cpu", dtype=torch.bfloat16)
      if arguments.precision == "bf16"
      else contextlib.nullcontext()
    )
    with precision:
      loss = forward(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()

  return step


def main() -> None:
  arguments = parse_arguments()
  torch.set_num_threads(arguments.threads)
  step = make_step(arguments)
  for _ in range(3):
    step()
  versions = {
    "torch": torch.__version__,
    "transformers": transformers.__version__,
  }
  print(json.dumps({"ready": True, **versions}), flush=True)
  for _ in sys.stdin:
    seconds = []
    for _ in range(arguments.updates_per_round):
      began = time.perf_counter()
      step()
      seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
  main()
