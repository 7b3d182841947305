"""What both programs of Hugging Face's side share: how an update is made.

What transformers' Trainer does: PyTorch's fused AdamW with weight decay on
weights only, and clipping by norm 1.
"""

import resource
import time

import torch
import transformers

WARM_UPDATES = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VERSIONS = {
  "torch": torch.__version__,
  "transformers": transformers.__version__,
}


def autocast(precision: str):
  """For "fp32" or "bf16"."""
  return torch.autocast(
    DEVICE, dtype=torch.bfloat16, enabled=precision == "bf16"
  )


class Updates:
  """Trains a model, an update a call."""

  def __init__(self, model, precision: str, **settings):
    """`settings` are AdamW's; a `schedule` may be set later."""
    self._model, self._precision = model, precision
    self.forward, self.schedule = model, None
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
    """The loss."""
    with autocast(self._precision):
      loss = self.forward(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
    self.optimizer.step()
    if self.schedule:
      self.schedule.step()
    self.optimizer.zero_grad(set_to_none=True)
    return loss.item()


def timed(update, count: int) -> dict:
  """Seconds of so many updates, and the examples that each says it had."""
  seconds, examples = [], []
  for _ in range(count):
    began = time.perf_counter()
    examples.append(update())
    seconds.append(time.perf_counter() - began)
  return {"seconds": seconds, "examples": examples}


def peak_memory_mb() -> int:
  """Of this process, or its tensors on a GPU, MB of 2^20 bytes."""
  if DEVICE == "cuda":
    return torch.cuda.max_memory_allocated() >> 20
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
