"""What transformers makes of a folder: run by a Python that has it, and torch.

It says "ready", then reads a JSON list of jobs a line and answers each line
with "done" or, with its errors on stderr, "failed". A job is ["make", FOLDER,
CLASS, CONFIG, SEED, NOISE], ["run", FOLDER, CLASS, BATCH.npz, OUTPUTS.npz],
["encode", FOLDER, IDS.json], ["embed", FOLDER, TEXTS.json, VECTORS.json] or
["tokenize", FOLDER, TEXTS.json, IDS.json]. A batch with labels gives gradients,
too, under "gradient:" and the tensor's name.
The fixture `peer` runs it; it imports nothing of this project.
"""

import json
import sys
import traceback

import numpy as np
import transformers


def lacks(name, is_packed=False):
  """Whether this version has no such class: 4 has fewer than 5."""
  if transformers.__version__ < "5" and name.startswith("ModernBert"):
    return is_packed  # there a mask is of the keys alone
  return not hasattr(transformers, name)


def make(folder, name, config, seed, noise=0.2):
  """Saves a model of random weights, `noise` from initial ones."""
  import torch  # tokenizers need none

  if lacks(name):
    return
  torch.manual_seed(seed)
  kind = getattr(transformers, name)
  model = kind(kind.config_class(**config))
  with torch.no_grad():
    for parameter in model.parameters():
      if parameter.requires_grad:  # RoFormer's sines are a parameter, too
        parameter.add_(noise * torch.randn_like(parameter))
  model.save_pretrained(folder)


def run(folder, name, batch_file, output_file):
  """Writes the outputs of a model, by transformers' names; none if it lacks."""
  import torch

  batch = {k: torch.tensor(v) for k, v in np.load(batch_file).items()}
  if lacks(name, "full_attention" in batch):
    return
  model, report = getattr(transformers, name).from_pretrained(
    folder, output_loading_info=True
  )
  # Nothing is missing or left; BertForQuestionAnswering has no pooler.
  wrong = [k for keys in report.values() for k in keys if "pooler" not in k]
  assert not wrong, report
  # Masks of packed rows, which only ModernBERT has for each type of layer.
  types = ("full_attention", "sliding_attention")
  masks = {k: batch.pop(k) for k in types if k in batch}
  if masks and hasattr(model.config, "layer_types"):
    batch["attention_mask"] = masks
  elif masks:
    batch["attention_mask"] = masks["full_attention"]
  outputs = model.eval()(**batch)
  arrays = {k: v.detach() for k, v in outputs.items() if torch.is_tensor(v)}
  if "labels" in batch:
    outputs["loss"].backward()
    for key, parameter in model.named_parameters():
      if parameter.grad is not None:  # RoFormer's sines have none
        arrays[f"gradient:{key}"] = parameter.grad
  np.savez(output_file, **{k: v.numpy() for k, v in arrays.items()})


def tokenize(folder, texts_file, ids_file):
  """Writes tokens of texts without special ones, and of a pair with them."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  with open(texts_file, encoding="utf-8") as f:
    texts = json.load(f)
  plain = tokenizer(
    texts, add_special_tokens=False, padding=False, return_offsets_mapping=True
  )
  pair = tokenizer(texts[0], texts[1], padding=False)
  names = ("pad", "unk", "cls", "sep", "mask")
  result = {
    "plain": plain["input_ids"],
    "places": plain["offset_mapping"],
    "words": [plain.word_ids(number) for number in range(len(texts))],
    "pair": [pair["input_ids"], pair.get("token_type_ids")],
    "special": [getattr(tokenizer, f"{name}_token_id") for name in names],
    "longest": tokenizer.model_max_length,
  }
  with open(ids_file, "w", encoding="utf-8") as f:
    json.dump(result, f)


def encode(folder, ids_file):
  """Writes the ids of a folder's texts.json, with special tokens."""
  with open(f"{folder}/texts.json", encoding="utf-8") as f:
    texts = json.load(f)
  result = {"version": transformers.__version__}
  try:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    masked = texts["mask"].replace("[MASK]", tokenizer.mask_token)
    result |= {
      "single": [tokenizer(text)["input_ids"] for text in texts["single"]],
      "pair": tokenizer(*texts["pair"])["input_ids"],
      "mask": tokenizer(masked)["input_ids"],
    }
    split = tokenizer(texts["words"], is_split_into_words=True)
    result["words"] = split["input_ids"]
  except Exception as e:
    # A folder of version 5's, or RoBERTa's words without a space before them.
    result["words"] = repr(e)
  with open(ids_file, "w", encoding="utf-8") as f:
    json.dump(result, f)


def embed(folder, texts_file, vectors_file):
  """Writes each side's vectors of a folder of sentence-transformers.

  And the folder as this version writes it; nothing without the library.
  """
  try:
    import sentence_transformers
  except ImportError:
    return
  model = sentence_transformers.SentenceTransformer(folder, device="cpu")
  with open(texts_file, encoding="utf-8") as f:
    texts = json.load(f)
  result = {"version": sentence_transformers.__version__}
  for side in ("query", "document"):
    known = {"prompt_name": side} if model.prompts.get(side) else {}
    result[side] = model.encode(texts, **known).tolist()
  model.save(folder + ".saved")
  with open(vectors_file, "w", encoding="utf-8") as f:
    json.dump(result, f)


if __name__ == "__main__":
  print("ready", flush=True)
  for line in sys.stdin:
    try:
      for command, *arguments in json.loads(line):
        globals()[command](*arguments)
      print("done", flush=True)
    except Exception:  # whatever it is, the next jobs can be done
      traceback.print_exc()
      print("failed", flush=True)
