"""Vectors of texts: by embedders, by plain encoders, and from folders."""

import json
import os
import pathlib
import shutil

import conversions
import numpy as np
import pytest
import trained
from samples import TINY

import predict
from checkpoints import checkpoint_weights
from common.errors import DataError, UserError
from finetuning import sides, windows
from interop import embedding, inference, model_source
from model import tasks, weights
from text_encoders.tokenizer_json import HuggingFaceEncoder
from text_encoders.wordpiece import WordPieceEncoder

TEXTS = ["a b c", "", "c d e " * 30, "ab", "d", "b c d e a b c"]


@pytest.fixture
def make(tmp_path, letters):
  """Opens an embedder of random weights whose task.json has other keys."""
  prefixes = []

  def made(kind="embedder", **task):
    folder = tmp_path / f"model{len(prefixes)}"
    prefixes.append(trained.write_model(folder, kind, letters))
    file = folder / "task.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    if task:
      file.write_text(json.dumps({**known, **task}))
    return folder, prefixes[-1]

  return made


def last_layer(prefix, letters, prompt, length):
  """float32 [tokens, H] of each text alone, from training's graph."""
  encoder = WordPieceEncoder(letters, True)
  examples = []
  for tokens in encoder.encode_batch([prompt + text for text in TEXTS]):
    examples.append(windows.encode_pair(encoder, length, tokens)[:2])
  rows = trained.expected("embedder", prefix, examples)
  return [row["encoder/sequence_output"] for row in rows]


def normed(vector):
  return vector / np.linalg.norm(vector)


# The prompt "ab " of `trained` is [CLS] and one token of `LETTERS`, or two.
PROMPT = 1 + len("ab")


@pytest.mark.parametrize(
  "task, query, document",
  [
    ({}, ("ab ", 24, slice(PROMPT, None), True), ("", 24, slice(None), True)),
    (
      {"include_prompt": True, "query_length": 6, "normalize": False},
      ("ab ", 6, slice(None), False), ("", 24, slice(None), False),
    ),
    ({"pooling": "cls", "prompts": {"document": "d "}, "max_seq_length": 9},
      ("", 9, slice(1), True), ("d ", 9, slice(1), True)),
  ],
)  # fmt: skip
def test_a_side_has_its_prompt_length_and_pooling(
  make, letters, task, query, document, capsys
):
  folder, prefix = make(**task)
  embedder = embedding.open_embedder(str(folder))
  for side, (prompt, length, pooled, norm) in {
    "query": query, "document": document,
  }.items():  # fmt: skip
    got = embedder.embed(TEXTS, side)
    assert got.shape == (len(TEXTS), TINY["hidden_size"])
    rows = last_layer(prefix, letters, prompt, length)
    for vector, tokens in zip(got, rows, strict=True):
      want = tokens[pooled].mean(0)
      want = normed(want) if norm else want
      np.testing.assert_allclose(vector, want, atol=2e-6)
  assert embedder.cut and capsys.readouterr().err.count("lose their end") == 1
  embedder.close()


def test_a_prompt_ends_before_the_first_word(bpe_file):
  """Whose token has the space between them."""
  encoder = HuggingFaceEncoder(bpe_file)
  task = {"prompts": {"query": "mat in "}, "include_prompt": False}
  side = sides.of_task(task, "query", encoder, 24)
  [(ids, _)] = side.encode(["the cat"])
  assert "".join(encoder.texts[n] for n in ids[side.pooled]) == " the cat[SEP]"


def test_the_nearest_texts_of_a_file(make, tmp_path, capsys):
  folder, prefix = make()
  texts, export = tmp_path / "texts.txt", str(tmp_path / "export")
  source = model_source.find(str(folder))
  inference.export(inference.open_checkpoint(source), source, export)
  lines = {1: "c d e", 3: "a b c", 4: "d" * 300}
  texts.write_text("\n".join([lines[1], "", lines[3], lines[4]]))
  embedder, nearest = embedding.open_embedder(export), []
  documents = embedder.embed([*lines.values()])
  for query in ("a b", "d d"):
    similar = documents @ embedder.embed([query], "query")[0]
    nearest.append(sorted(zip(similar, lines, strict=True), reverse=True)[:2])
  settings = predict.PredictSettings(nearest_in=str(texts), top_k=2, json=True)
  for name in (str(folder), prefix, export):
    predict.main(settings, name, "a b", "d d")
    answers = map(json.loads, capsys.readouterr().out.splitlines())
    for answer, near in zip(answers, nearest, strict=True):
      found = [(one["similarity"], one["line"]) for one in answer["nearest"]]
      np.testing.assert_allclose(found, near, atol=1e-6)
  settings = predict.PredictSettings(nearest_in=str(texts))
  predict.main(settings, export, "a b")
  first, *found = capsys.readouterr().out.splitlines()
  assert first == "a b" and len(found) == 3
  assert any(line.endswith(f"  {'d' * 94} [...]") for line in found)


@pytest.mark.parametrize(
  "content, wrong",
  [(None, "there is no such file"), ("\n \n", "there is no text in it")],
)
def test_no_texts_to_find(make, tmp_path, content, wrong):
  folder, _ = make()
  texts = tmp_path / "texts.txt"
  if content:
    texts.write_text(content)
  settings = predict.PredictSettings(nearest_in=str(texts))
  with pytest.raises(UserError, match=f"--nearest_in={texts}: {wrong}"):
    predict.main(settings, str(folder), "a")


def test_an_export_of_another_model_has_no_vectors(make, tmp_path):
  folder, _ = make("ner")
  source = model_source.find(str(folder))
  model = inference.open_checkpoint(source)
  inference.export(model, source, str(tmp_path / "export"))
  with pytest.raises(UserError, match="is of no embedder: name the model"):
    embedding.open_embedder(str(tmp_path / "export"))
  embedder = embedding.open_embedder(str(folder))
  assert embedder.embed(["a"]).shape == (1, TINY["hidden_size"])


# Folders of sentence-transformers -----------------------------------------

KEPT = json.loads(
  pathlib.Path(conversions.__file__)
  .with_name("sentence_vectors.json")
  .read_text()
)
LIBRARY = "sentence_transformers"
TYPES = {
  "old": f"{LIBRARY}.models.",
  "new": f"{LIBRARY}.sentence_transformer.modules.any.",
}
# Name -> pooling, whether normalised, settings, include_prompt.
SETTINGS = {
  "mean": ("mean", True, {}, True),
  "cls": ("cls", False, {"similarity_fn_name": "dot"}, True),
  "prompts": (
    "mean", True,
    {"prompts": {"query": "ab ", "document": "", "topic": "c"}}, False,
  ),
  "usual": (
    "mean", False,
    {"prompts": {"passage": "d "}, "default_prompt_name": "passage",
     "similarity_fn_name": "manhattan"}, True,
  ),
}  # fmt: skip
FOLDER_TEXTS, POOLING = TEXTS[:4], "1_Pooling/config.json"
LONGEST = 20


def write_sentences(folder, name, form, letters, inside=""):
  """A folder as sentence-transformers writes it, of fixed weights."""
  pooling, normalize, settings, include = SETTINGS[name]
  values = conversions.random_values((weights.ENCODER, weights.POOLER), seed=3)
  encoder = conversions.write_folder(
    folder / inside, conversions.their_tensors(values),
    architectures=["BertModel"],
  )  # fmt: skip
  shutil.copyfile(letters, encoder / "vocab.txt")
  modules = []
  for kind, path in (
    ("Transformer", inside), ("Pooling", "1_Pooling"), ("Normalize", "2_Normal")
  )[: 2 + normalize]:  # fmt: skip
    module = {"path": path, "type": TYPES[form] + kind}
    modules.append({"idx": len(modules), "name": kind, **module})
  pooled = {f"pooling_mode_{m}": m[:3] == pooling[:3] for m in
            ("cls_token", "mean_tokens", "max_tokens")}  # fmt: skip
  tokenizer = {"do_lower_case": True, "tokenizer_class": "BertTokenizer"}
  lengths = {"max_seq_length": LONGEST, "do_lower_case": False}
  if form == "new":
    pooled, lengths = {"pooling_mode": pooling}, {}
    lengths["transformer_task"] = "feature-extraction"
    tokenizer["model_max_length"] = LONGEST
  for file, content in (
    (folder / "modules.json", modules),
    (
      folder / POOLING,
      {**pooled, "include_prompt": include, "word_embedding_dimension": 32},
    ),
    (folder / f"config_{LIBRARY}.json", settings),
    (encoder / "sentence_bert_config.json", lengths),
    (encoder / "tokenizer_config.json", tokenizer),
  ):
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))
  return folder


def vectors_of(folder):
  """Side -> the vectors of a folder's embedder, float32 [texts, d]."""
  embedder = embedding.open_embedder(str(folder))
  found = {side: embedder.embed(FOLDER_TEXTS, side) for side in tasks.SIDES}
  embedder.close()
  return found


def assert_kept(found, name):
  for side, kept in KEPT[name].items():
    got = np.array(found[side])[:, : len(kept[0])]
    np.testing.assert_allclose(got, kept, atol=1e-5, err_msg=f"{name}, {side}")


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
  "form, inside", [("old", ""), ("old", "0_Transformer"), ("new", "")]
)
def test_a_folder_of_sentence_transformers_is_read_in_place(
  tmp_path, letters, name, form, inside
):
  folder = write_sentences(tmp_path / "folder", name, form, letters, inside)
  assert_kept(vectors_of(folder), name)
  if form == "new":
    return
  notes = "\n".join(model_source.find(str(folder)).notes)
  assert ("topic" in notes) == (name == "prompts")
  assert ("manhattan" in notes) == (name == "usual")
  # Through our files and back it stays what it is.
  conversions.convert(folder, tmp_path / "ours.ckpt", to="tensorflow")
  again = tmp_path / "again"
  conversions.convert(tmp_path / "ours.ckpt", again)
  assert_kept(vectors_of(again), name)
  card = (again / "README.md").read_text()
  assert "sentence-similarity" in card and "SentenceTransformer(" in card
  assert ('prompt_name="query"' in card) == ("prompts" in SETTINGS[name][2])
  # Any training can start from it.
  located = model_source.locate(str(folder))
  assert set(checkpoint_weights.open_checkpoint(located.path).shapes) == set(
    conversions.random_values((weights.ENCODER, weights.POOLER))
  )


def test_the_library_gives_the_same_vectors(tmp_path, letters, peer):
  """For folders as it writes them, ours, and those that it makes of ours."""
  texts, jobs, folders = tmp_path / "texts.json", [], {}
  texts.write_text(json.dumps(FOLDER_TEXTS))
  for name in SETTINGS:
    read = write_sentences(tmp_path / name, name, "old", letters)
    ours = tmp_path / f"{name}.ours"
    conversions.convert(read, ours, to="huggingface")
    for folder in (read, ours):
      folders[folder] = name
      jobs.append(["embed", str(folder), str(texts), f"{folder}.json"])
  peer(jobs)
  if not os.path.exists(f"{read}.json"):
    pytest.skip("NOT COMPARED: the peer lacks sentence-transformers")
  for folder, name in folders.items():
    theirs = json.loads(pathlib.Path(f"{folder}.json").read_text())
    assert_kept(theirs, name)
    # Newer versions add empty prompts, which win over the usual one.
    if name != "usual":
      assert_kept(vectors_of(f"{folder}.saved"), name)


def changed(folder, file, **keys):
  path = folder / file
  content = json.loads(path.read_text()) if path.exists() else {}
  if isinstance(content, list):
    content[keys["number"]]["type"] = keys["type"]
  else:
    content |= keys
  path.write_text(json.dumps(content))


@pytest.mark.parametrize(
  "file, keys, wrong",
  [
    ("modules.json", {"number": 2, "type": f"{LIBRARY}.models.Dense"}, "Dense"),
    ("modules.json", {"number": 0, "type": "theirs.Own"}, r"theirs\.Own"),
    (POOLING, {"pooling_mode_max_tokens": True}, r"'mean \+ max'"),
    (POOLING, {"pooling_mode": "lasttoken"}, "'lasttoken'"),
    (POOLING, {"pooling_mode": "cls", "include_prompt": False}, r"\[CLS\]"),
    ("sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length"),
    ("sentence_roberta_config.json", {"do_lower_case": True}, "lower_case"),
    (f"config_{LIBRARY}.json", {"model_type": "SparseEncoder"}, "model_type"),
    (f"config_{LIBRARY}.json", {"truncate_dim": 8}, "truncate_dim"),
    ("sentence_bert_config.json", {"query_length": 8}, "query_length"),
  ],
)
def test_what_is_not_known_is_refused_by_name(
  tmp_path, letters, file, keys, wrong
):
  folder = write_sentences(tmp_path / "folder", "mean", "old", letters)
  changed(folder, file, **keys)
  if "do_lower_case" in keys:
    changed(folder, "tokenizer_config.json", do_lower_case=False)
  with pytest.raises(DataError, match=f"{file}: not known here: .*{wrong}"):
    model_source.find(str(folder))
  (folder / "modules.json").unlink()
  assert model_source.find(str(folder)).task["task"] == tasks.PRETRAINING
