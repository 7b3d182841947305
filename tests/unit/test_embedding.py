"""Vectors of texts: by embedders, by plain encoders, and from folders."""

import json

import numpy as np
import pytest
import trained
from samples import TINY

from finetuning import windows
from interop import embedding
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
