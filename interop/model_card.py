"""README.md of a Hugging Face folder: what the run's files say of the model.

Names of the machine's files are left out: a card is for publishing.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from common.console import shown
from interop import model_source
from training import metrics, run_folder

CARD_FILE = "README.md"
# Architecture -> the Hub's name of what it does.
_PIPELINES = {
  "BertForPreTraining": "fill-mask",
  "BertForMaskedLM": "fill-mask",
  "BertForSequenceClassification": "text-classification",
  "BertForQuestionAnswering": "question-answering",
}
_COUNTS = ("documents", "sentences", "tokens", "text_bytes", "examples")
_FLAGS = (
  "learning_rate", "lr_schedule", "optimizer", "bias_correction", "beta_2",
  "weight_decay_rate", "precision", "num_train_epochs", "max_seq_length",
  "seed",
)  # fmt: skip
_PER_CENT = ("accuracy",)


def write(
  path: str,
  folder: str,
  inputs: Sequence[str],
  config: dict,
  task: dict,
  parameters: int,
  licence: str,
  languages: Sequence[str],
) -> None:
  """Writes the card of a model that goes to `folder`.

  `inputs` are its checkpoints, `config` is its config.json, `task` its
  task.json.
  """
  architecture = config["architectures"][0]
  pipeline = _PIPELINES.get(architecture, "feature-extraction")
  header = {
    "library_name": "transformers", "license": licence,
    "language": list(languages), "pipeline_tag": pipeline,
    "mask_token": "[MASK]" if pipeline == "fill-mask" else "",
    "tags": ["bert", "perseus-bert"],
  }  # fmt: skip
  # JSON is YAML.
  yaml = [f"{key}: {json.dumps(v)}" for key, v in header.items() if v]
  name = os.path.basename(os.path.abspath(folder))
  sections = {
    "Use": _use(pipeline),
    "Training data": _table(_data(inputs[0], task)),
    "Training": _table(_training(inputs[0])),
    "Results": _table(_results(inputs)),
    "Framework": _table(_framework(inputs[0])),
  }
  lines = ["---", *yaml, "---", "", f"# {name}", ""]
  lines.append(
    f"{architecture} with {config['num_hidden_layers']} layers of "
    f"{config['hidden_size']}, {config['num_attention_heads']} heads, "
    f"{parameters:,} parameters and a vocabulary of {config['vocab_size']:,} "
    f"tokens; {'lower-cased' if task.get('do_lower_case', True) else 'cased'} "
    "text."
  )
  if labels := task.get("labels"):
    lines.append(f"Labels: {', '.join(map(_cell, labels))}.")
  if licence == "unknown":
    lines += ["", "The licence is not stated: set `license` above."]
  for title, content in sections.items():
    content = content or ["Not known: no file of a run is beside the weights."]
    lines += ["", f"## {title}", "", *content]
  with open(path, "w", encoding="utf-8") as f:
    f.write("\n".join(lines) + "\n")


def _use(pipeline: str) -> list[str]:
  quoted = '"..."'
  given = {
    "fill-mask": '"... [MASK] ..."',
    "question-answering": 'question="...", context="..."',
  }
  return [
    "```python",
    "from transformers import pipeline",
    "",
    f'model = pipeline("{pipeline}", model=".")  # this folder',
    f"print(model({given.get(pipeline, quoted)}))",
    "```",
  ]


def _data(checkpoint: str, task: dict) -> Iterator[tuple]:
  found = model_source.manifest_of_run(os.path.dirname(checkpoint))
  if found:
    manifest = found[1]
    for key in _COUNTS:
      yield key, manifest.counts.get(key)
    yield "tokens in a record", manifest.max_seq_length
    yield "masks", manifest.masking
    for key in ("masked_lm_prob", "do_whole_word_mask", "dupe_factor"):
      yield key, manifest.settings.get(key)
  elif data := (_run(checkpoint).get("data") or {}):
    yield "task", task["task"]
    yield "records", data.get("records")


def _run(checkpoint: str) -> dict:
  """The newest training of the checkpoint's run; {} without one."""
  return run_folder.last_training(os.path.dirname(checkpoint)) or {}


def _training(checkpoint: str) -> Iterator[tuple]:
  run = _run(checkpoint)
  if not run:
    return
  plan, flags = (
    run["plan"],
    {**run["flags"], **run["flags"].get("optimizer", {})},
  )
  yield "updates planned", plan["updates"]
  if step := _step(checkpoint):
    yield "update of these weights", step
  yield "records an update", plan["records_per_update"]
  yield "warm-up updates", plan["warmup_updates"]
  yield "ranks", plan["ranks"]
  for key in _FLAGS:
    yield key, flags.get(key)
  yield "started from other weights", bool(flags.get("init_checkpoint"))


def _step(checkpoint: str) -> int | None:
  found = re.search(r"model\.ckpt-(\d+)$", checkpoint)
  return int(found[1]) if found else None


def _results(inputs: Sequence[str]) -> Iterator[tuple]:
  """The evaluation of these very weights."""
  path = os.path.join(os.path.dirname(inputs[0]), metrics.EVAL_METRICS_FILE)
  step = _step(inputs[0]) if len(inputs) == 1 else None
  found = [r for r in metrics.read_jsonl(path) if r.get("global_step") == step]
  for key, value in found[-1].items() if found else ():
    if key != "global_step":
      yield key, value
  flags = _run(inputs[0]).get("flags", {})
  if found and not flags.get("eval_input_file", "else"):
    yield "evaluated on", "the training records"


def _framework(checkpoint: str) -> Iterable[tuple]:
  return (_run(checkpoint).get("versions") or {}).items()


def _table(rows: Iterable[tuple]) -> list[str]:
  lines = [
    f"| {key.replace('_', ' ')} | {_cell(value, key)} |"
    for key, value in rows
    if value is not None
  ]
  return ["| | |", "|---|---|", *lines] if lines else []


def _cell(value, key: str = "") -> str:
  if isinstance(value, bool):
    return "yes" if value else "no"
  if isinstance(value, int):
    return str(value) if key == "seed" else f"{value:,}"
  if isinstance(value, float):
    return shown(value, ".1%" if key.endswith(_PER_CENT) else ".5g")
  text = str(value).replace("|", "\\|").replace("<", "&lt;")
  return " ".join(text.split())
