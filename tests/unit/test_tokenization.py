"""Tokens: google/bert's on any Unicode, through the slow and the fast path."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import reference_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import write_vocabulary
from tokenizers import models

import tokenization
from common.files import file_sha256
from corpus import prose
from records import data_set
from text_encoders import kinds, tokenizer_files, wordpiece
from text_encoders.base import SPECIAL_TOKENS, TokenizerInfo
from text_encoders.characters import has_chinese, letters_of
from text_encoders.sentencepiece_model import SentencePieceEncoder
from text_encoders.wordpiece import WordPieceEncoder, word_spans
from tools import train_tokenizer

# Characters where Unicode tables, context or splitting could differ.
TRICKY = (
  "Σσς\u0301\u0130ıßẞ\u0345\u0307\u037e\u1fef\u2028\u2029\x85\x1c\x00\ufffd"
  "\ufeff\u200d\u00ad\u3000\u00a0\u2002\u4e00\u9fff\ua000\u3400\uf900\U00020000"
  "\u0316\u0344\u302e\u0f71\u0f72\u093c\u05b0ﷺ가"  # marks that NFD sorts
  "\U0002a6df\U0002b73f\U0002ceb0\U0002ceaf\U0002f800\U00030000한かカ·«»—…'`^$\t\r"
)

TEXT = st.text(
  st.one_of(
    st.sampled_from(TRICKY),
    st.sampled_from("abcAB [MASK]#.,é "),
    st.characters(),  # lone surrogates included
  ),
  max_size=60,
)


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory):
  letters = [chr(c) for c in range(0x21, 0x500) if chr(c).strip() == chr(c)]
  letters += ["\u4e00", "\U00020000", "σ", "ς", "\u1112", "か"]
  pieces = dict.fromkeys(
    [*letters, *("##" + c for c in letters), "ab", "##bc", "MASK", "mask"]
  )
  path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
  return write_vocabulary(path, [*SPECIAL_TOKENS, *pieces])


@pytest.fixture(scope="module")
def pairs(vocab_file):
  """(reference, encoder) for both settings of do_lower_case.

  The reference gives the ids of a text word by word.
  """
  vocab = tokenization.load_vocab(vocab_file)
  pieces = models.WordPiece(
    vocab=dict(vocab), unk_token="[UNK]", max_input_chars_per_word=200
  )

  def ids(lower, text):
    tokens = []
    for word in reference_tokenizer.words(text, lower):
      try:
        tokens += [piece.id for piece in pieces.tokenize(word)]
      except UnicodeEncodeError:  # a lone surrogate: Rust strings have none
        tokens.append(vocab["[UNK]"])
    return tokens

  return [
    (functools.partial(ids, lower), WordPieceEncoder(vocab_file, lower))
    for lower in (True, False)
  ]


@settings(deadline=None, max_examples=1500)
@given(TEXT)
@example("")
@example(" \t ")
@example("\x00\ufffd")
@example("ΑΣ ΑΣ.Α Σ ΑΣ\u0301 Α·Σ'")
@example("a" * 200 + " " + "a" * 201)
@example("[MASK][CLS] [SEP]")
def test_encoder_equals_reference(pairs, text):
  for reference, encoder in pairs:
    (got,) = encoder.encode_batch([text])
    assert got.dtype == np.int32
    assert got.tolist() == reference(text)


def test_words_equal_reference_on_every_character():
  # Later planes hold nothing but tags, variation selectors and private use.
  codes = [*range(0x32000), *range(0xE0000, 0xE0200)]
  lines = ["".join(map(chr, codes[i : i + 96])) for i in codes[::96]]
  for lower in (True, False):
    tokenize = tokenization.BasicTokenizer(lower).tokenize
    for line in lines:
      assert tokenize(line) == reference_tokenizer.words(line, lower)


def test_a_full_cache_starts_again(vocab_file, monkeypatch):
  monkeypatch.setattr(wordpiece, "_MAX_CACHED_WORDS", 2)
  encoder = WordPieceEncoder(vocab_file, True)
  reference = tokenization.FullTokenizer(vocab_file)
  line = "ab cb ab abc b a ab cb"
  want = reference.convert_tokens_to_ids(reference.tokenize(line))
  assert encoder.encode_batch([line, line])[1].tolist() == want
  assert len(encoder.pieces_of.__self__) <= 2


def test_basic_tokenizer_by_hand():
  for lower, text, want in (
    (True, " \tHÉllo!how  \n Are yoU? ", "hello ! how are you ?".split()),
    (False, "HÉllo!how", ["HÉllo", "!", "how"]),
    (True, "ah博推zz", ["ah", "博", "推", "zz"]),
    (True, "a\u2028b\x00c\ufffdd\u200de", ["a", "bcde"]),
    (False, "a\u0301", ["a\u0301"]),
    (True, "\u037e", [";"]),  # the Greek question mark decomposes into ";"
  ):
    assert tokenization.BasicTokenizer(lower).tokenize(text) == want
    assert reference_tokenizer.words(text, lower) == want


# CJK Unified Ideographs with extensions A to E as google/bert bounds them,
# Compatibility Ideographs and their supplement; and what is beside these.
CHINESE_SIGNS = (
  0x4E00, 0x9FFF, 0x3400, 0x4DBF, 0x20000, 0x2A6DF, 0x2A700, 0x2B73F, 0x2B740,
  0x2B81F, 0x2B820, 0x2CEAF, 0xF900, 0xFAFF, 0x2F800, 0x2FA1F,
)  # fmt: skip
OTHER_SIGNS = (
  0x4DFF, 0xA000, 0x33FF, 0x4DC0, 0x1FFFF, 0x2A6E0, 0x2A6FF, 0x2CEB0, 0xF8FF,
  0xFB00, 0x2F7FF, 0x2FA20, *map(ord, "aé¼，。あ"),
)  # fmt: skip


def test_chinese_characters():
  assert all(map(has_chinese, map(chr, CHINESE_SIGNS)))
  assert not any(map(has_chinese, map(chr, OTHER_SIGNS)))


def test_wordpiece_by_hand():
  vocab = {t: i for i, t in enumerate(["[UNK]", "un", "##aff", "##able", "a"])}
  tokenizer = tokenization.WordpieceTokenizer(vocab, max_input_chars_per_word=9)
  assert tokenizer.tokenize("unaffable") == ["un", "##aff", "##able"]
  assert tokenizer.tokenize("unaffablea a") == ["[UNK]", "a"]
  assert tokenizer.tokenize("unx a") == ["[UNK]", "a"]
  assert tokenizer.tokenize("") == []


def test_load_vocab_breaks_at_newlines_only(tmp_path):
  path = tmp_path / "vocab.txt"
  path.write_bytes("a\r\n\u2028\nx\u2028y\n b \nc".encode())
  vocab = {"a": 0, "": 1, "x\u2028y": 2, "b": 3, "c": 4}
  assert tokenization.load_vocab(str(path)) == vocab


def test_line_numbers_are_ids(tmp_path):
  """Blank lines at the end have none: a model has no rows for them."""
  for lines, ids in (
    ("a b a", [7, 6]),  # of equal tokens the last counts, as in google/bert
    ("a b [MASK]", [5, 6]),
    ("a b \r \r", [5, 6]),
    ("a \u3000 b", [5, 7]),  # an unusual space is a token
    ("a  b", [5, 7]),  # as is what stood in a blank line that others follow
    ("a b \u3000", [5, 6, 7]),
  ):
    lines = [*SPECIAL_TOKENS, *lines.split(" ")]
    path = write_vocabulary(tmp_path / "v.txt", lines)
    encoder = kinds.load_tokenizer(path)
    assert encoder.encode_batch(["a b"])[0].tolist() == ids[:2]
    assert encoder.vocab_size == max(*ids, encoder.mask_id) + 1
    assert [encoder.tokens[number] for number in ids[:2]] == ["a", "b"]
    vocab = tokenization.load_vocab(path)
    assert [vocab["a"], vocab["b"]] == ids[:2]
    made = tokenizer_files.make_tokenizer(encoder).encode("a b")
    assert made.ids == [encoder.cls_id, *ids[:2], encoder.sep_id]


def test_continuations_and_info(vocab_file):
  encoder = WordPieceEncoder(vocab_file, True)
  (ids,) = encoder.encode_batch(["abc x"])
  assert encoder.is_continuation[ids].tolist() == [False, True, False]
  assert not encoder.is_continuation[: len(SPECIAL_TOKENS)].any()
  size = len(tokenization.load_vocab(vocab_file))
  sha256 = file_sha256(vocab_file)
  assert encoder.info() == TokenizerInfo(
    "wordpiece", "vocab.txt", sha256, size, True, 4
  )


def test_unfit_vocabularies(tmp_path):
  file = {"vocab_file": str(tmp_path / "v.txt")}
  for tokens, files, words in (
    (["[PAD]", "[UNK]", "[CLS]", "a"], file, r"lacks \[SEP\], \[MASK\]"),
    ([], file, "lacks"),
    (['{"model": {}}'], file, "is a tokenizer.json: give it as --tokenizer_f"),
    ([], {"vocab_file": str(tmp_path)}, "is a folder: .* --tokenizer_file=/"),
    ([], {"vocab_file": f"{tmp_path}/no.txt"}, "no.txt: No such file"),
    ([], {}, "name one"),
    ([], {**file, "spm_model_file": "x.model"}, "name one"),
  ):
    write_vocabulary(tmp_path / "v.txt", tokens)
    with pytest.raises(data_set.DataError, match=words):
      kinds.load_tokenizer(**files)


def test_case_of_published_checkpoints():
  check = tokenization.validate_case_matches_checkpoint
  for lower, name in (
    (True, "uncased_L-12_H-768_A-12"), (True, "uncased_L-2_H-128_A-2"),
    (True, "chinese_L-12_H-768_A-12"), (False, "multi_cased_L-12_H-768_A-12"),
    (False, "wwm_cased_L-24_H-1024_A-16"), (False, "mine"),
  ):  # fmt: skip
    check(lower, f"x/{name}/bert_model.ckpt")
    if name != "mine":
      with pytest.raises(ValueError, match=f"--do_lower_case={lower}"):
        check(not lower, f"x/{name}/bert_model.ckpt")
  check(True, None)


def test_split_sentences():
  for text, language, sentences in (
    ("Dr. Smith went\nhome. He slept!  It rained.", "en",
     ["Dr. Smith went home.", "He slept!", "It rained."]),
    ("今天下雨。我在家。", "zh", ["今天下雨。", "我在家。"]),
    (" \n ", "en", []),
  ):  # fmt: skip
    assert prose.split_sentences(text, language) == sentences


# Training ---------------------------------------------------------------------


def corpus_lines(count=400):
  rng = np.random.default_rng(0)
  stems = ["Walk", "talk", "jump", "sing", "réad", "play", "cook", "paint"]
  ends = ["", "ing", "ed", "er", "s"]
  return [
    " ".join(rng.choice(stems) + rng.choice(ends) for _ in range(8)) + "."
    for _ in range(count)
  ]


def test_the_command_trains_the_same_wordpieces_in_any_process(tmp_path):
  # Hash tables are seeded at random once in each.
  rng = np.random.default_rng(1)
  words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(300)]
  text, out = tmp_path / "text.txt", tmp_path / "new" / "vocab.txt"
  text.write_text("\n".join(words), encoding="utf-8")
  command = [sys.executable, "-m", "tools.train_tokenizer", "--vocab_size=150"]
  command += [f"--output_file={out}", f"--input_file={text}"]
  outputs = set()
  for _ in range(3):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "150 tokens (wordpiece)" in done.stdout
    outputs.add(out.read_bytes())
    out.unlink()
  assert len(outputs) == 1 and outputs.pop().count(b"\n") == 150


def test_trained_wordpiece_spells_its_text(tmp_path, monkeypatch):
  """Also where a frequent word is counted in parts, to save memory."""
  out, outputs = str(tmp_path / "vocab.txt"), set()
  for number in (1, 7, 10_000):
    monkeypatch.setattr(train_tokenizer, "_AT_ONCE", number)
    train_tokenizer.train_wordpiece(corpus_lines(), out, 60)
    outputs.add((tmp_path / "vocab.txt").read_bytes())
  assert len(outputs) == 1
  tokens = list(tokenization.load_vocab(out))
  assert tuple(tokens[:5]) == SPECIAL_TOKENS
  assert len(set(tokens)) == len(tokens) <= 60
  encoder = WordPieceEncoder(out, True)
  for ids in encoder.encode_batch(corpus_lines(20)):
    assert len(ids) and encoder.unk_id not in ids
  assert "walk" in tokens and "Walk" not in tokens


def test_sentencepiece_says_which_line_is_wrong(tmp_path):
  """Not the library, which makes a SystemError of it."""

  def lines():
    yield from corpus_lines()
    raise data_set.DataError("a.jsonl: byte 7")

  with pytest.raises(data_set.DataError, match=r"a\.jsonl: byte 7"):
    train_tokenizer.train_sentencepiece(lines(), str(tmp_path / "m"), 60)


def test_sentencepiece_reads_long_lines(tmp_path):
  """The library alone would leave out lines of more than 4,192 bytes."""
  lines = ["xyz xyw " * 1000, "猫" * 5000, "a" * 4192, "", " "]
  parts = list(train_tokenizer._parts(lines))
  assert all(len(part.encode()) <= 4192 for part in parts)
  assert "".join(parts) == "".join(lines[:3])
  assert all(part.endswith("xyw ") for part in parts[:8])
  assert parts[-1] == lines[2]
  path = str(tmp_path / "long.model")
  train_tokenizer.train_sentencepiece([*lines[:2], "ab"] * 20, path, 30)
  encoder = kinds.load_tokenizer(spm_model_file=path)
  (ids,) = encoder.encode_batch(["xyz xyw 猫"])
  assert encoder.unk_id not in ids


def test_a_tokenizer_learns_from_a_sample_of_much_text(capfd):
  lines = [f"sentence {number}" for number in range(10_000)]
  assert train_tokenizer.sample(lines, 200_000) == lines
  assert not capfd.readouterr().err
  sample = train_tokenizer.sample(iter(lines), 20_000)
  assert 8_000 < sum(map(len, sample)) <= 20_000
  numbers = [int(line.split()[1]) for line in sample]
  assert numbers == sorted(set(numbers))
  quarters = np.histogram(numbers, bins=4, range=(0, 10_000))[0]
  assert quarters.min() > 0.7 * quarters.mean()
  assert train_tokenizer.sample(lines, 20_000) == sample
  assert "learning from 0.12 of the lines" in capfd.readouterr().err
  # One line that is larger than all of it gives parts, too.
  assert sum(map(len, train_tokenizer.sample(["a b " * 10**5], 40_000))) > 9_000


LONG = ["กขคง" * 51, "acgt" * 51, "x" * 201]


def test_small_vocabularies_and_text_without_a_word(tmp_path):
  out = str(tmp_path / "vocab.txt")
  lines = ["".join(map(chr, range(0x4E00, 0x4E40))), "the the the"]
  train_tokenizer.train_wordpiece(lines, out, 15)
  assert len(tokenization.load_vocab(out)) <= 15
  no_word = "no word of at most 200 letters.*--tokenizer=sentencepiece"
  for lines, size, words in (
    (["abc abd"], 6, "too small"), (["", " "], 100, no_word),
    (LONG, 100, no_word),
  ):  # fmt: skip
    with pytest.raises(data_set.DataError, match=words):
      train_tokenizer.train_wordpiece(lines, out, size)


def test_what_a_vocabulary_leaves_out_is_told(tmp_path, capsys):
  for lines, size, share in (
    ([*LONG, "a" * 15], 100, "97.6%"),
    (["a" * 300, "b " * 700], 100, "30.0%"),  # one word
    (["ab " * 45, "鼠牛虎兔龍蛇馬羊猴鷄"], 10, "10.0%"),  # rare characters
    (["กุ กุก", "กุก"], 100, "37.5%"),  # marks
    (["acgt" * 50, "ab", "한국어"], 100, ""),
  ):
    out = str(tmp_path / "vocab.txt")
    train_tokenizer.train_wordpiece(lines, out, size)
    told = capsys.readouterr().err
    assert told.startswith(f"{share} of the letters are left" if share else "")
    assert bool(told) == bool(share)
    # As the report on records counts them.
    encoder, spelt = kinds.load_tokenizer(out), 0
    for ids in encoder.encode_batch(lines):
      spelt += encoder.letters[ids].sum()
    total = letters_of("".join(lines))
    assert f"{1 - spelt / total:.1%}" == (share or "0.0%")


def test_unknown_letters_of_sentencepiece(spm_file):
  """The library makes one token of several letters that it does not know."""
  encoder = kinds.load_tokenizer(spm_model_file=spm_file)
  for line, unknown in (
    ("walking", 0),
    ("กขคง" * 100, 400),
    ("กขคง walking กข", 6),
    ("walกkingข", 2),
    ("", 0),
  ):
    (ids,) = encoder.encode_batch([line])
    spelt = encoder.letters[ids].sum()
    assert letters_of(line) - spelt == unknown


@pytest.fixture(scope="module")
def spm_file(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("spm") / "text.model")
  train_tokenizer.train_sentencepiece(corpus_lines(), path, 60)
  return path


def test_sentencepiece(spm_file, tmp_path):
  encoder = kinds.load_tokenizer(spm_model_file=spm_file)
  assert encoder.pad_id == 0
  assert len({encoder.unk_id, encoder.cls_id, encoder.sep_id}) == 3
  lines = ["Walking talked", "", "[MASK] \udc80 sing"]
  walking, empty, special = encoder.encode_batch(lines)
  assert walking.dtype == empty.dtype == np.int32 and len(empty) == 0
  assert encoder.mask_id not in special
  starts = ~encoder.is_continuation[walking]
  assert starts.sum() == 2 and starts[0]
  assert encoder.info().kind == "sentencepiece"
  assert encoder.info().vocab_size == encoder.vocab_size
  again = str(tmp_path / "again.model")
  train_tokenizer.train_sentencepiece(corpus_lines(), again, 60)
  assert file_sha256(again) == file_sha256(spm_file)


def test_the_rest_of_a_line_has_the_tokens_it_has_in_the_line(
  spm_file, vocab_file
):
  """Where a word ends, and inside of one: there no space is read."""
  lines = ["the cat sat on the mat.", "a \U0001f600b, c \ud800!", "x\u4f60y"]
  spm = SentencePieceEncoder(spm_file, True)
  for line in [*lines, *corpus_lines()[:20]]:
    spans = spm._pieces(line)
    whole = spm.encode_batch([line])[0].tolist()
    cleaned = spm._clean(line)
    for number, (_, begin, _) in enumerate(spans[1:], 1):
      rest = spm.encode_rest(cleaned[begin:])
      assert rest.tolist() == whole[number:] and rest.dtype == np.int32
  assert spm.encode_rest("").tolist() == []
  words = WordPieceEncoder(vocab_file, True)
  whole = words.encode_batch(["the"])[0].tolist()
  assert words.encode_rest("the").tolist() == whole


def test_unfit_sentencepiece_models(tmp_path):
  import sentencepiece

  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(corpus_lines()), vocab_size=40, minloglevel=2,
    model_prefix=str(tmp_path / "plain"), hard_vocab_limit=False,
  )  # fmt: skip
  with pytest.raises(data_set.DataError, match=r"lacks \[PAD\], \[CLS\]"):
    SentencePieceEncoder(str(tmp_path / "plain.model"), True)
  noise = tmp_path / "noise.model"
  noise.write_bytes(b"no model")
  with pytest.raises(data_set.DataError, match="noise.model"):
    SentencePieceEncoder(str(noise), True)


# Whole words ------------------------------------------------------------------

CHINESE = "中国共产党今天在北京开会，hellos world。国"
CHINESE_WORDS = "中国共产党 今天 在 北京 开会 ， hellos world 。 国".split()


def words_of(tokens, is_continuation):
  """Tokens that make a word, put together."""
  words = []
  for token, more in zip(tokens, is_continuation, strict=True):
    if more:
      words[-1] += token.removeprefix("##")
    else:
      words.append(token)
  return words


def test_wordpiece_words_are_chinese_words_too(tmp_path):
  vocab = [*SPECIAL_TOKENS, *"中国共产党今天在北京开会，。"]
  vocab += ["hello", "##s", "wor", "##ld"]
  path = write_vocabulary(tmp_path / "vocab.txt", vocab)
  encoder = WordPieceEncoder(path, True)
  lines = [CHINESE, "hellos world", "", "今 天"]
  encoded = encoder.encode_words(lines)
  for ids, words in zip(encoder.encode_batch(lines), encoded, strict=True):
    np.testing.assert_array_equal(ids, words.ids)
    assert words.is_continuation.dtype == bool
    assert len(words.is_continuation) == len(ids)
  found = [
    words_of([vocab[i] for i in w.ids], w.is_continuation) for w in encoded
  ]
  # google/bert's tokens do not say that there was a space in the last.
  assert found == [CHINESE_WORDS, ["hellos", "world"], [], ["今天"]]


def test_sentencepiece_words_are_chinese_words_too(tmp_path):
  model = str(tmp_path / "m.model")
  train_tokenizer.train_sentencepiece([CHINESE, "hello world"] * 20, model, 40)
  encoder = SentencePieceEncoder(model, True)
  lines = [CHINESE, "hello world", "", "今天 hello\ud800"]
  encoded = encoder.encode_words(lines)
  for ids, words in zip(encoder.encode_batch(lines), encoded, strict=True):
    np.testing.assert_array_equal(ids, words.ids)
  made = []
  for words in encoded:
    pieces = [encoder.tokens[i].replace("\u2581", " ") for i in words.ids]
    words = words_of(pieces, words.is_continuation)
    made.append([word.strip() for word in words])
  # Pieces may hold more than a word, but words end where words end.
  ends = lambda words: set(np.cumsum([len(w) for w in words if w]).tolist())
  assert ends(made[0]) <= ends(CHINESE_WORDS)
  assert 3 < len(made[0]) < len(encoded[0].ids)
  assert made[1:3] == [["hello", "world"], []]


def test_names_that_google_berts_tests_use():
  """tests/google_bert_tests.sh runs them on a checkout of google/bert."""
  kinds = {}
  for kind in ("whitespace", "control", "punctuation"):
    is_one = getattr(tokenization, f"_is_{kind}")
    kinds[kind] = "".join(filter(is_one, " \r\u00a0\u0005\U0001f4a9-$`A"))
  assert kinds == {
    "whitespace": " \r\u00a0", "control": "\u0005", "punctuation": "-$`",
  }  # fmt: skip


def test_where_words_stand():
  """The words between these places are BasicTokenizer's, cased."""
  text = " I'm\t(a-b) \u4e2d\u6587x\u00ad.\u00a0caf\u00e9\u3000$1_0  \u200b"
  spans = word_spans(text)
  words = [text[begin:end] for begin, end in spans]
  split = tokenization.BasicTokenizer(do_lower_case=False).tokenize
  assert [word for part in words for word in split(part)] == split(text)
  assert all(len(split(word)) <= 1 for word in words)
  assert words[-1] == "\u200b"  # of which nothing is left
  assert word_spans("") == []
