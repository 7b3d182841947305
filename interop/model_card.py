"""README.md of a Hugging Face folder: what the run's files say of the model.

Names of the machine's files are left out: a card is for publishing.
"""

import json
import os
from collections.abc import Iterator, Sequence

from checkpoints import checkpoint_files, description, metrics
from checkpoints.description import Description
from common import files
from config.optimizers import AVERAGE
from finetuning.metrics import THRESHOLD
from model.tasks import EMBEDDER, EMBEDDING, HEADS, MASKED_LM, SIDES, is_cosine

CARD_FILE = "README.md"
# What follows "For" in an architecture -> the Hub's name of what it does.
_PIPELINES = {head.architecture: head.pipeline for head in HEADS}
_PIPELINES["PreTraining"] = MASKED_LM.pipeline
_SETTINGS = ("objective", "masked_lm_prob", "do_whole_word_mask", "dupe_factor")
_COUNTS = ("documents", "sentences", "tokens", "text_bytes", "examples")
_CASES = {
  True: "lower-cased text",
  False: "cased text",
  None: "no file says whether of lower-cased text",
}
# The gaps are a pipeline with its options, and the text that it reads.
_USE = """```python
from transformers import pipeline

model = pipeline("{}", model="."{})  # this folder
print(model("{}"))
```"""
# transformers 5 has no pipeline for questions.
_USE_FOR_QUESTIONS = """```python
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")  # this folder
model = AutoModelForQuestionAnswering.from_pretrained(".")
inputs = tokenizer("a question", "its paragraph", return_tensors="pt")
scores = model(**inputs)
start, end = scores.start_logits.argmax(), scores.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, start : end + 1]))
```"""
# The gaps are the name of each side's prompt, if it has one, and a similarity.
_USE_FOR_VECTORS = """```python
from sentence_transformers import SentenceTransformer, util

model = SentenceTransformer(".")  # this folder
queries = model.encode(["a question"]{})
documents = model.encode(["a text", "another text"]{})
print(util.{}(queries, documents))
```"""
_TRAIN_ON = "To train it on with Perseus-BERT: `--init_checkpoint=THIS_FOLDER`."
# A word's label is that of its first token.
_OPTIONS = {"token-classification": ', aggregation_strategy="first"'}
_OPTIONS_OF_SETS = ', top_k=None, function_to_apply="sigmoid"'
_UNKNOWN = "Not known: no file beside the weights says it."
# Of the training's settings those that somebody needs to judge or repeat it.
_FLAGS = (
  "objective", "segment_ids", "initial_weights", "learning_rate",
  "lr_schedule", "optimizer", "bias_correction", "beta_2",
  "weight_decay_rate", "precision", "num_train_epochs", "max_seq_length",
  "hidden_dropout_prob", "attention_probs_dropout_prob", "seed",
  "temperature", "both_directions",
)  # fmt: skip
# Names for people of keys that do not say it themselves.
_NAMES = {
  "masked_lm_prob": "share of the tokens to mask",
  "do_whole_word_mask": "whole words masked",
  "dupe_factor": "copies of each document",
  "lr_schedule": "learning rate schedule",
  "max_seq_length": "tokens of an example, at most",
  "hidden_dropout_prob": "dropout in this training",
  "attention_probs_dropout_prob": "dropout of attention in this training",
  **metrics.LABELS,
}


def write(
  path: str, folder: str, model, config: dict, mask: str, licence: str,
  languages: Sequence[str],
) -> None:  # fmt: skip
  """Writes a model's card: of its checkpoints, config.json and task.json.

  `model` is a `model_writing.Model`, `mask` its tokenizer's name of [MASK].
  """
  task, architecture = model.task, config["architectures"][0]
  parameters = sum(value.size for value in model.values.values())
  _, _, use = architecture.rpartition("For")  # RoFormer begins with another
  library, pipeline = "transformers", _PIPELINES.get(use, "feature-extraction")
  if task.get("task") == EMBEDDER:
    library, pipeline = "sentence-transformers", EMBEDDING.pipeline
  header = {
    "library_name": library, "license": licence,
    "language": list(languages), "pipeline_tag": pipeline,
    "mask_token": mask if pipeline == "fill-mask" else "",
    "tags": [config["model_type"], "perseus-bert"],
  }  # fmt: skip
  # The Hub reads YAML, and JSON is YAML.
  lines = ["---"]
  for key, value in header.items():
    if value:
      lines.append(f"{key}: {json.dumps(value)}")
  lines += ["---", "", f"# {folder}", ""]
  lines.append(
    f"{architecture} with {config['num_hidden_layers']} layers of "
    f"{config['hidden_size']}, {config['num_attention_heads']} heads, "
    f"{parameters:,} parameters and a vocabulary of {config['vocab_size']:,} "
    f"tokens; {_CASES[task.get('do_lower_case')]}."
  )
  if task.get("labels"):
    lines.append(f"Labels: {', '.join(map(_cell, task['labels']))}.")
  if task.get("multi_label"):
    threshold = task.get("label_threshold", THRESHOLD)
    lines.append(
      "Each label is decided by itself, so a text may have several, or none: "
      f"those with a sigmoid score above {threshold:.4g}."
    )
  if library != "transformers":
    lines.append(_vectors(task, config["hidden_size"]))
  if licence == "unknown":
    lines += ["", "The licence is not stated: set `license` above."]
  lines += ["", "## Use", "", _usage(pipeline, task, mask), "", _TRAIN_ON]
  inputs = [model.source.path, *model.others]
  lines += _tables(model.source.about, inputs, model.is_average)
  card = "\n".join(lines) + "\n"
  files.write(path, card.encode(errors="backslashreplace"))


def _tables(
  about: Description, inputs: Sequence[str], is_average: bool
) -> list[str]:
  """What the run's files say, if the weights still lie beside them."""
  lines, run = list[str](), about.start_of(about.step)
  span = run.get("flags", {}).get("average_updates") if is_average else None
  averaged = "average of the weights over updates", span
  for title, rows in (
    ("Training data", _data(about, run)),
    ("Training", [*_training(inputs, run), averaged]),
    ("Results", _results(inputs, is_average, about, run)),
    ("Framework", run.get("versions", {}).items()),
  ):
    table = []
    for key, value in rows:
      if value is not None:
        name = _NAMES.get(key, key.replace("_", " "))
        table.append(f"| {name} | {_cell(value, key)} |")
    table = ["| | |", "|---|---|", *table] if table else [_UNKNOWN]
    lines += ["", f"## {title}", "", *table]
  return lines


def _usage(pipeline: str, task: dict, mask: str) -> str:
  if pipeline == "question-answering":
    return _USE_FOR_QUESTIONS
  if pipeline == EMBEDDING.pipeline:
    prompts = task.get("prompts", {})
    names = [f', prompt_name="{s}"' if prompts.get(s) else "" for s in SIDES]
    function = "cos_sim" if is_cosine(task) else "dot_score"
    return _USE_FOR_VECTORS.format(*names, function)
  text = f"... {mask} ..." if pipeline == "fill-mask" else "..."
  options = _OPTIONS.get(pipeline, "")
  if task.get("multi_label"):
    options = _OPTIONS_OF_SETS
  return _USE.format(pipeline, options, text)


def _vectors(task: dict, width: int) -> str:
  """How an embedder's texts become vectors, in a line or two."""
  lines = [f"A text's vector has {width} numbers, the last layer's "]
  if task.get("pooling") == "cls":
    lines.append("output at [CLS]")
  else:
    lines.append("mean")
    if not task.get("include_prompt", True):
      lines.append(" over the tokens after the prompt")
  if task.get("normalize"):
    lines.append(", of length 1")
  if task.get("matryoshka_dims"):
    dims = " or ".join(map(str, task["matryoshka_dims"]))
    lines.append(f"; it was trained to be cut to its first {dims}")
  lines.append(f". Vectors are compared by {task.get('similarity', 'cosine')}")
  for side, prompt in task.get("prompts", {}).items():
    if prompt:
      lines.append(f"; before a {side} stands {_cell(repr(prompt))}")
  if task.get("query_length"):
    lines.append(f"; queries were of {task['query_length']} tokens at most")
  return "".join(lines) + "."


def _data(about: Description, run: dict) -> Iterator[tuple]:
  records = about.manifest()
  if records:
    _, manifest = records
    for key in _COUNTS:
      yield key, manifest.counts.get(key)
    yield "tokens in a record", manifest.max_seq_length
    yield "masks", manifest.masking
    # Masks that training drew anew are not the records'.
    in_training = run.get("flags", {}).get("masks", {})
    for key in _SETTINGS:
      if not in_training.get(key):
        yield key, manifest.settings.get(key)
  elif run.get("data"):
    yield "examples", run["data"].get("examples")
    yield "records that hold them", run["data"].get("records")


def _training(inputs: Sequence[str], run: dict) -> Iterator[tuple]:
  if not run:
    return
  plan, flags = run["plan"], run["flags"]
  minutes = flags.get("max_train_minutes")
  yield "minutes planned", minutes or None
  yield "updates planned", None if minutes else plan.get("updates")
  # A mean is of several updates of one run, or of several runs.
  steps = [checkpoint_files.step_of(checkpoint) for checkpoint in inputs]
  if len(set(map(os.path.dirname, inputs))) > 1:
    updates = ", ".join(map(str, steps)).replace("None", "?")
    yield "mean of the weights of several runs, at updates", updates
    yield "data, training and versions are those of", "the first"
  elif len(steps) == 1:
    yield "update of these weights", steps[0]
  else:
    yield "mean of the weights of updates", ", ".join(map(str, steps))
  for key in ("records_per_update", "warmup_updates", "ranks"):
    yield key, plan.get(key)
  # A flag wins over the config's key, unless nobody gave it.
  used = dict(flags.get("bert", {}))
  for key, value in flags.items():
    if value is not None:
      used[key] = value
  used |= flags.get("optimizer", {})
  for key in _FLAGS:
    yield key, used.get(key)
  yield "sampled_softmax", flags.get("sampled_softmax") or None
  masks = flags.get("masks", {})
  if shares := masks.get("masked_lm_prob"):
    yield "masked when training", " to ".join(f"{p:g}" for p in shares)
  yield "whole words masked when training", masks.get("do_whole_word_mask")
  for number, stage in enumerate(flags.get("stages") or (), 1):
    settings = [f"{k} {v}" for k, v in stage.items() if k != "input_file"]
    yield f"stage {number}", ", ".join(settings)
  others = flags.get("init_checkpoint") or flags.get("cooldown_from")
  yield "started from other weights", bool(others)


def _results(inputs: Sequence[str], is_average: bool, about: Description, run):
  """The evaluation of these very weights; a mean of several has none."""
  held_out = description.is_held_out(run, about.record_files)
  # Evaluations of other updates say nothing of these weights.
  step = checkpoint_files.step_of(inputs[0]) if len(inputs) == 1 else None
  for results in metrics.evaluations(about.folder):
    of_average = results.pop(metrics.EVALUATED_WEIGHTS, None) == AVERAGE
    if results.pop("global_step") == step and of_average == is_average:
      results.pop(metrics.EVALUATION_SET, None)
      yield from results.items()
      if held_out is False:
        yield "evaluated on", "the training records"


def _cell(value, key: str = "") -> str:
  if isinstance(value, bool):
    return "yes" if value else "no"
  if isinstance(value, int):
    return str(value) if key == "seed" else f"{value:,}"
  if isinstance(value, float):
    return format(value, ".1%" if key.endswith("accuracy") else ".5g")
  text = str(value).replace("|", "\\|").replace("<", "&lt;")
  return " ".join(text.split())
