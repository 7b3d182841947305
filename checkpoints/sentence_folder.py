"""The files with which sentence-transformers says how texts become vectors.

They stand beside a Hugging Face folder's, or around it: an old folder has its
encoder in 0_Transformer. Versions 2 to 6 of the library have two forms of some
(https://github.com/huggingface/sentence-transformers). All of them read the
older one, which is written.
"""

import glob
import os
import sys
from typing import Any

from common import json_files
from common.errors import DataError
from common.model_files import THEIR_CONFIG, TOKENIZER_CONFIG_FILE
from model.tasks import DOCUMENT, EMBEDDER, POOLINGS, QUERY, SIMILARITIES

_LIBRARY = "sentence_transformers"
MODULES_FILE, SETTINGS_FILE = "modules.json", f"config_{_LIBRARY}.json"
_LENGTH_FILE = "sentence_bert_config.json"
_KINDS = "Transformer", "Pooling", "Normalize"
# The older files have a boolean for each; all versions know these four.
_MODES = {
  "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean",
  "pooling_mode_max_tokens": "max",
  "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}  # fmt: skip
_MODULES = [{"type": str, "path": str}]
_POOLING = {"pooling_mode": POOLINGS, "include_prompt": bool}
_LENGTH = {
  "max_seq_length?": (int, None), "do_lower_case?": bool,
  "transformer_task?": "feature-extraction",
  "module_output_name?": "token_embeddings",
  "query_length?": None, "document_length?": None, "query_expansion?": None,
  "processing_kwargs?": None,
}  # fmt: skip
_SETTINGS = {
  "prompts?": dict, "default_prompt_name?": (str, None),
  "similarity_fn_name?": (str, None), "model_type?": "SentenceTransformer",
  "truncate_dim?": None,
}  # fmt: skip
# The names of a document's prompt; the first that is not empty counts.
_DOCUMENTS = DOCUMENT, "passage", "corpus"
_PROBLEM = f"not known here: {{}}. For its encoder alone remove {MODULES_FILE}"


def _read(folder: str, name: str, form) -> Any:
  """A file's content; {} without it, `DataError` for what is not known here."""
  path = os.path.join(folder, name)
  if not os.path.exists(path):
    return {}
  return json_files.read(path, form, _PROBLEM)


def encoder_of(folder: str) -> str:
  """Where a folder's encoder is: in itself, if it has no modules.json."""
  for module in _read(folder, MODULES_FILE, _MODULES):
    if module["path"]:
      return os.path.join(folder, module["path"])
    break
  return folder


def _around(encoder: str) -> str:
  """The folder whose modules.json begins with this encoder; "" without one."""
  for folder in (encoder, os.path.dirname(os.path.abspath(encoder))):
    is_there = os.path.exists(os.path.join(folder, MODULES_FILE))
    inner = os.path.realpath(encoder_of(folder))
    if is_there and inner == os.path.realpath(encoder):
      return folder
  return ""


def read_task(encoder: str, positions: int) -> tuple[dict, list[str]]:
  """What task.json says of an encoder's embedder, and lines for people.

  Nothing if no files around it are of one. Raises `DataError` if they are of
  one that is not known here. `positions`: the longest that the encoder reads.
  """
  folder = _around(encoder)
  if not folder:
    return {}, []
  names, paths = [], []
  for module in _read(folder, MODULES_FILE, _MODULES):
    library, *_, name = module["type"].split(".")
    names.append(name if library == _LIBRARY else module["type"])
    paths.append(os.path.join(folder, module["path"]))
  normalize = len(names) > 2
  if (*names,) != _KINDS[: 2 + normalize]:
    text = f"the modules {', '.join(names)}, instead of {', '.join(_KINDS)}"
    file = os.path.join(folder, MODULES_FILE)
    raise DataError(f"{file}: {_PROBLEM.format(text)}")
  settings, notes = _read(folder, SETTINGS_FILE, _SETTINGS), list[str]()
  task = {
    "task": EMBEDDER,
    **_pooling(paths[1]),
    "normalize": normalize,
    "prompts": _prompts(folder, settings, notes),
    "max_seq_length": min(_length(encoder), positions),
  }
  similarity = settings.get("similarity_fn_name") or SIMILARITIES[0]
  if similarity in SIMILARITIES:
    task["similarity"] = similarity
  else:
    notes.append(
      f"{folder}: {similarity} compared its vectors there, here "
      f"{SIMILARITIES[0]} does"
    )
  return task, notes


def _pooling(folder: str) -> dict:
  """The keys "pooling" and "include_prompt" of task.json."""
  content = {"include_prompt": True, **_read(folder, THEIR_CONFIG, {})}
  modes = content.get("pooling_mode")
  if "pooling_mode" not in content:
    older = [k for k in content if k.startswith("pooling_mode_") and content[k]]
    modes = [_MODES.get(key, key) for key in older]
  if isinstance(modes, list):  # several are put one after the other
    modes = " + ".join(map(str, modes)) or POOLINGS[0]
  try:
    json_files.expect({**content, "pooling_mode": modes}, _POOLING)
    if modes == "cls" and not content["include_prompt"]:
      raise ValueError("include_prompt is false, with [CLS] as the vector")
  except ValueError as e:
    path = os.path.join(folder, THEIR_CONFIG)
    raise DataError(f"{path}: {_PROBLEM.format(e)}") from e
  return {"pooling": modes, "include_prompt": content["include_prompt"]}


def _prompts(folder: str, settings: dict, notes: list[str]) -> dict[str, str]:
  """Each side's prompt; `notes` gets a line about those that no side has."""
  there: dict[str, str] = {}
  for name, text in settings.get("prompts", {}).items():
    there[name] = text or ""
  usual = there.get(settings.get("default_prompt_name") or "", "")
  prompts = {QUERY: there.pop(QUERY, usual)}
  prompts[DOCUMENT] = "" if DOCUMENT in there else usual
  for name in reversed(_DOCUMENTS):
    prompts[DOCUMENT] = there.pop(name, "") or prompts[DOCUMENT]
  others = [n for n, text in there.items() if text not in prompts.values()]
  if others:
    notes.append(
      f"{folder}: only prompts of queries and documents are used here, not "
      f"{', '.join(others)}"
    )
  return prompts


def _length(encoder: str) -> int:
  """The most tokens of a text that the encoder's files say."""
  # Older files are called sentence_roberta_config.json and the like.
  pattern = os.path.join(glob.escape(encoder), "sentence_*_config.json")
  tokenizer, lengths = _read(encoder, TOKENIZER_CONFIG_FILE, {}), []
  for path in glob.glob(pattern):
    known = _read(encoder, os.path.basename(path), _LENGTH)
    lengths.append(known.get("max_seq_length"))
    # With a tokenizer that lower-cases anyway it says nothing.
    if known.get("do_lower_case") and not tokenizer.get("do_lower_case"):
      problem = "do_lower_case is true, but not its tokenizer's"
      raise DataError(f"{path}: {_PROBLEM.format(problem)}")
  lengths.append(tokenizer.get("model_max_length"))
  return int(next(filter(None, lengths), sys.maxsize))


def write(folder: str, task: dict, width: int, length: int) -> None:
  """Writes the files of an embedder with this task.json beside its encoder.

  `width`: the numbers of a vector, `length`: the most tokens of a text.
  """
  pooling: dict = {"word_embedding_dimension": width}
  for key, mode in _MODES.items():
    pooling[key] = mode == task.get("pooling", POOLINGS[0])
  if not task.get("include_prompt", True):  # the first versions lack it
    pooling["include_prompt"] = False
  modules = []
  for number, name in enumerate(_KINDS[: 2 + task.get("normalize", False)]):
    kind = f"{_LIBRARY}.models.{name}"
    path = f"{number}_{name}" if number else ""
    module = {"idx": number, "name": str(number), "path": path, "type": kind}
    modules.append(module)
    os.makedirs(os.path.join(folder, path), exist_ok=True)
  prompts = {}
  for side, text in task.get("prompts", {}).items():
    if text:  # versions 2 leave [CLS] out of the mean with an empty one
      prompts[side] = text
  settings = {
    "__version__": {_LIBRARY: "2.0.0"},  # of the files' form
    "prompts": prompts,
    "default_prompt_name": None,
    "similarity_fn_name": task.get("similarity", SIMILARITIES[0]),
    "model_type": _SETTINGS["model_type?"],
  }
  for path, content in {
    MODULES_FILE: modules,
    os.path.join("1_Pooling", THEIR_CONFIG): pooling,
    _LENGTH_FILE: {"max_seq_length": length, "do_lower_case": False},
    SETTINGS_FILE: settings,
  }.items():
    json_files.write(os.path.join(folder, path), content)
