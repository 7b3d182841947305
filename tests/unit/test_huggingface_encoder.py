"""Any tokenizer.json as a vocabulary: the library's tokens, words, places."""

import itertools
import json
import os
import shutil

import numpy as np
import pytest
import runs
import samples
import tokenizers
from conversions import convert
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from common import json_files
from common.errors import DataError, UserError
from interop import inference, model_source, predictions
from records import record_report, tf_example, tfrecord
from text_encoders import kinds, tokenizer_files
from text_encoders.base import SENTENCEPIECE_SPACE, SPECIAL_TOKENS
from text_encoders.characters import has_chinese, letters_of
from text_encoders.tokenizer_json import HuggingFaceEncoder
from tools import inspect_records, train_tokenizer

TEXT = [
  "The cat sat on the mat, and it's the cats' mat.",
  "Naïve cafés in Zürich: 12345 cups!  Two   spaces, a\ttab.",
  "中国人民大学的学生喜欢学习。",
  "我爱北京天安门",
  "😀 smile 👩\u200d👩\u200d👧 family",
] * 20
ODD = [
  "", " ", "\u3000\xa0 ", "a\0b", "\ud800 lone \udfff", "x" * 30_000, "e\u0301",
  "  led by two", "ends  ", "cat\u200bcat \ufeffmat", "ﬁne ½ ™",
]  # fmt: skip
OTHERS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def unigram():
  """As XLM-R's, which cuts and pads by itself."""
  made = tokenizers.Tokenizer(models.Unigram())
  made.normalizer = normalizers.NFKC()
  made.pre_tokenizer = pre_tokenizers.Metaspace()
  given = dict(vocab_size=300, unk_token="<unk>", show_progress=False)
  trainer = trainers.UnigramTrainer(special_tokens=OTHERS, **given)
  made.train_from_iterator(TEXT, trainer)
  made.enable_truncation(3)
  made.enable_padding(length=50)
  return made


def wordpiece():
  """Not as google/bert's: it keeps Chinese together and accents."""
  made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
  made.normalizer = normalizers.Lowercase()
  made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  trainer = trainers.WordPieceTrainer(
    vocab_size=300, special_tokens=[*SPECIAL_TOKENS], show_progress=False
  )
  made.train_from_iterator(TEXT, trainer)
  return made


def bpe(prefix=False, special=SPECIAL_TOKENS):
  """As RoBERTa's; merges by chance while it is trained."""
  made = tokenizers.Tokenizer(models.BPE(dropout=0.5))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
  made.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=400, special_tokens=[*special],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
  )  # fmt: skip
  made.train_from_iterator(TEXT, trainer)
  return made


MAKERS = {
  "unigram": unigram,
  "wordpiece": wordpiece,
  "bpe": bpe,
  "bpe with a prefix": lambda: bpe(True),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """Kind -> path."""
  folder = tmp_path_factory.mktemp("tokenizers")
  paths = {name: str(folder / f"{name}.json") for name in MAKERS}
  for name, make in MAKERS.items():
    make().save(paths[name])
  return paths


def library(path):
  """The library's own, without what this project switches off."""
  with open(path, encoding="utf-8") as f:
    content = json.load(f)
  content |= {"truncation": None, "padding": None}
  content["model"] |= {"dropout": None}
  return tokenizers.Tokenizer.from_str(json.dumps(content))


def test_there_is_a_kind_for_each_flag():
  for kind, encoder in kinds.KINDS.items():
    assert encoder.kind == kind
    assert f"--{encoder.flag}" in kinds.VOCABULARY_FLAGS
  assert kinds.VOCABULARIES["tokenizer_file"] == "tokenizer.json"


@pytest.mark.parametrize("name", MAKERS)
def test_tokens_words_and_places_are_the_librarys(files, name):
  encoder, theirs = HuggingFaceEncoder(files[name]), library(files[name])
  lines = [*TEXT[:5], *ODD]
  batch, words = encoder.encode_batch(lines), encoder.encode_words(lines)
  for line, ids, word in zip(lines, batch, words, strict=True):
    line = line.encode("utf-8", "replace").decode()
    want = theirs.encode(line, add_special_tokens=False)
    spans = encoder.encode_with_spans(line)
    assert ids.dtype == np.int32 and ids.tolist() == want.ids
    assert word.ids.tolist() == spans.ids.tolist() == want.ids
    # The library's places, but no spaces around them.
    places = zip(want.offsets, spans.starts, spans.ends, strict=True)
    for (a, b), start, end in places:
      assert line[start:end] == line[a:b].strip() and a <= start <= end <= b
    if not has_chinese(line):
      same = [a == b for a, b in itertools.pairwise(want.word_ids)]
      assert word.is_continuation[1:].tolist() == same
      assert not word.is_continuation[:1].any()


@pytest.mark.parametrize("name", MAKERS)
def test_text_is_never_a_special_token(files, name):
  encoder = HuggingFaceEncoder(files[name])
  special = {encoder.tokens.index(t) for t in encoder.special.values()}
  assert special >= {encoder.mask_id, encoder.cls_id, encoder.sep_id}
  text = " ".join([*SPECIAL_TOKENS, *OTHERS, "a[MASK]b<s>"])
  for ids in (encoder.encode_batch([text])[0], encoder.encode_rest(text)):
    assert special.intersection(ids.tolist()) <= {encoder.unk_id}
  # The library alone reads them as tokens.
  known = library(files[name]).encode(text, add_special_tokens=False)
  assert encoder.mask_id in known.ids


@pytest.mark.parametrize("name", MAKERS)
def test_text_that_goes_on_has_only_its_own_spaces(files, name):
  encoder = HuggingFaceEncoder(files[name])

  def shown(text):
    texts = [encoder.texts[i] for i in encoder.encode_rest(text)]
    return "".join(texts).replace("##", "").replace("\u2581", " ")

  drops = " " if name == "wordpiece" else ""  # it knows no spaces
  for text in ("'s mat", ". the", "s", "", "12"):
    assert shown(text) == text.replace(drops or "\0", "")
  assert shown(" mat").strip() == "mat"
  with_space = encoder.encode_rest(" mat").tolist()
  assert (with_space == encoder.encode_rest("mat").tolist()) == bool(drops)


@pytest.mark.parametrize("name", MAKERS)
def test_chinese_words_are_jiebas(files, name):
  encoder = HuggingFaceEncoder(files[name])
  line = "学生喜欢 mat学习。"
  (words,) = encoder.encode_words([line])
  spans = encoder.encode_with_spans(line)
  # Where words begin, but for a mark that has no letters.
  is_begin = ~words.is_continuation & (spans.ends > spans.starts)
  begins = {*spans.starts[is_begin].tolist()}
  assert begins >= {0, 2, 8} and not begins & {1, 3, 9}


def test_a_line_that_is_one_word_to_the_library(tmp_path):
  made = unigram()
  made.pre_tokenizer = None
  made.normalizer = normalizers.Replace(" ", SENTENCEPIECE_SPACE)
  made.save(str(tmp_path / "a.json"))
  encoder = HuggingFaceEncoder(str(tmp_path / "a.json"))
  (words,) = encoder.encode_words(["a the cat"])
  begins = [encoder.tokens[i] for i in words.ids[~words.is_continuation]]
  assert len(begins) == 3 and begins[1][0] == begins[2][0] == "\u2581"


@pytest.mark.parametrize("name", MAKERS)
def test_letters_and_texts_for_people(files, name):
  encoder = HuggingFaceEncoder(files[name])
  assert encoder.joiner == (" " if name == "bpe" else "")
  for line in (*TEXT[:5], "北京 😀"):
    (ids,) = encoder.encode_batch([line])
    letters = letters_of(line)
    spelt = encoder.letters[ids].sum()
    if name.startswith("bpe"):  # parts of a character count as one each
      assert spelt >= letters and (spelt == letters or not line.isascii())
    elif encoder.unk_id not in ids:
      assert spelt == letters
  assert encoder.letters[encoder.mask_id] == 0
  if name.startswith("bpe"):
    (ids,) = encoder.encode_batch(["the cafés"])
    assert "".join(encoder.texts[i] for i in ids).strip() == "the cafés"
    byte = encoder.tokens.index("ŀ")  # the last byte of a character
    assert encoder.texts[byte] == "\ufffd"


NO_UNK = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *"ACGT"]


def test_a_named_mask_is_one_though_the_file_adds_none(tmp_path):
  """As transformers adds it, and the library needs no [UNK] for its own."""
  ids = {token: number for number, token in enumerate(NO_UNK)}
  model = tokenizers.models.WordLevel(ids, unk_token="[UNK]")
  library = tokenizers.Tokenizer(model)
  library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  library.save(str(tmp_path / "tokenizer.json"))
  encoder = HuggingFaceEncoder(str(tmp_path / "tokenizer.json"))
  assert encoder.encode_with_masks("A [MASK] C").tolist() == [4, 3, 5]
  (tokens,) = encoder.encode_batch(["A C G T"])
  assert tokens.tolist() == [4, 5, 6, 7]
  tokenizer_files.write_tokenizer(str(tmp_path), encoder, 64)


def test_who_says_which_tokens_are_special(tmp_path):
  names = ["<|begin|>", "<|end|>", "<|nothing|>", "<|hidden|>"]
  path = tmp_path / "tokenizer.json"
  bpe(special=names).save(str(path))
  with pytest.raises(DataError, match=r"lacks \[PAD\], \[CLS\].* may name oth"):
    HuggingFaceEncoder(str(path))
  said = {"bos_token": {"content": names[0]}, "eos_token": names[1]}
  (tmp_path / "special_tokens_map.json").write_text(json.dumps(said))
  said = {"pad_token": names[2], "mask_token": names[3], "cls_token": None}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
  encoder = HuggingFaceEncoder(str(path))
  assert (encoder.cls_id, encoder.sep_id) == (0, 1)
  assert (encoder.pad_id, encoder.mask_id) == (2, 3)
  # A BPE has no [UNK]: no text is unknown.
  assert "unk" not in encoder.special and encoder.unk_id == encoder.pad_id
  # A copy knows them, also by another name.
  for name, content in encoder.files("b.json").items():
    (tmp_path / name).write_bytes(content)
  copy = HuggingFaceEncoder(str(tmp_path / "b.json"))
  assert copy.special == encoder.special


def test_the_file_decides_the_case(files):
  for name, lower in (("wordpiece", True), ("bpe", False)):
    named = {"tokenizer_file": files[name]}
    encoder, lines = tokenizer_files.load(named, None)
    assert encoder.do_lower_case is lower
    assert not any("capitals" in line for line in lines)
    with pytest.raises(UserError, match=f"was trained on .*{name}.json"):
      tokenizer_files.load(named, not lower)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {}}', "far"])
def test_what_is_no_tokenizer(files, tmp_path, content):
  """Of numbers far beyond the tokens no list is made."""
  words = r"not a tokenizer.json: \w"
  if content == "far":
    changed = json_files.read(files["wordpiece"])
    changed["model"]["vocab"]["far"] = 2**31
    content, words = (
      json.dumps(changed),
      r"renumber its \d+ tokens: one is 2147",
    )
  path = tmp_path / "a.json"
  path.write_text(content)
  with pytest.raises(DataError, match=f"a.json: {words}"):
    kinds.load_tokenizer(tokenizer_file=str(path))


# Records ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Text, and a tokenizer that tools.train_tokenizer made of it.

  Not as a file of another tokenizer says, which stood there.
  """
  folder = tmp_path_factory.mktemp("trained")
  documents = ["The cat sat. [MASK] it?\nOn the mat\n中国人民大学\n"] * 30
  (folder / "text.txt").write_text("\n".join(documents), encoding="utf-8")
  stale = {"add_prefix_space": True, "additional_special_tokens": ["[E1]"]}
  (folder / "tokenizer_config.json").write_text(json.dumps(stale))
  for name in ("tokenizer.json", "again.json"):
    settings = train_tokenizer.Settings(
      input_file=f"{folder}/text.txt", output_file=f"{folder}/{name}",
      vocab_size=300, tokenizer="bpe", do_lower_case=name == "tokenizer.json",
    )  # fmt: skip
    train_tokenizer.main(settings)
  return folder


def test_a_trained_bpe(trained, tmp_path):
  path = str(trained / "tokenizer.json")
  encoder = HuggingFaceEncoder(path)
  assert tuple(encoder.tokens[:5]) == SPECIAL_TOKENS
  assert 261 < encoder.vocab_size <= 300 and encoder.do_lower_case
  assert not HuggingFaceEncoder(str(trained / "again.json")).do_lower_case
  said = json.loads((trained / "tokenizer_config.json").read_text())
  assert said["mask_token"] == "[MASK]" and said["do_lower_case"] is True
  assert "add_prefix_space" not in said and "[E1]" not in encoder.tokens
  # Equal bytes, and no text is unknown.
  lines = (trained / "text.txt").read_text().split("\n")
  train_tokenizer.train_bpe(lines, f"{tmp_path}/a.json", 300)
  with open(path, "rb") as f:
    assert (tmp_path / "a.json").read_bytes() == f.read()
  (ids,) = encoder.encode_batch(["ÀÉ \x07 \U0010ffff"])
  assert encoder.unk_id not in ids
  made = tokenizers.Tokenizer.from_file(path).encode("a [MASK]", "b")
  # The space before [MASK] is its own, as in ModernBERT's.
  a, b = map(encoder.tokens.index, "ab")
  assert made.ids == [2, a, 4, 3, b, 3]
  assert made.type_ids == [0, 0, 0, 0, 1, 1]
  with pytest.raises(DataError, match="vocab_size=260 is too small: give 261"):
    train_tokenizer.train_bpe(lines, f"{tmp_path}/b.json", 260)
  assert not os.path.exists(f"{tmp_path}/b.json")


def test_records(trained, tmp_path, capsys):
  """The same for any workers; a line goes on after a space; no masked [SEP]."""
  made = []
  for number in (1, 2):
    folder = tmp_path / str(number)
    summary = samples.create(
      folder, f"{trained}/text.txt", None, num_workers=number,
      tokenizer_file=f"{trained}/tokenizer.json", examples_per_record=3,
      objective="mlm", cross_documents=True, do_whole_word_mask=True,
      max_seq_length=48, max_predictions_per_seq=16, masked_lm_prob=0.3,
      short_seq_prob=0.9,
    )  # fmt: skip
    made.append(samples.contents(folder / "out"))
  assert made[0] == made[1]
  info = summary.manifest.tokenizer
  encoder = HuggingFaceEncoder(f"{trained}/tokenizer.json")
  assert info == encoder.info() and info.file == "tokenizer.json"
  special = {*range(5)}
  records = tfrecord.RecordSet([f"{folder}/out/train.tfrecord"])
  packed = separators = 0
  texts = ""
  for number in range(len(records)):
    record = tf_example.decode_example(records.read(number))
    used = record["masked_lm_weights"] > 0
    masked = record["masked_lm_ids"][used].tolist()
    assert masked and not special.intersection(masked)
    packed += record["input_mask"].max() > 1
    ids, _ = record_report.original_ids(record)
    texts += "".join(encoder.texts[i] for i in ids)
    separators += np.count_nonzero(record["input_ids"] == encoder.sep_id)
  assert "[mask] it? on the mat" in texts
  assert packed and separators > 2 * len(records)
  # inspect_records shows them as text, found beside the records.
  os.symlink(trained / "tokenizer.json", folder / "out" / "tokenizer.json")
  settings = inspect_records.InspectSettings(num_workers=1, num_examples=1)
  inspect_records.main(settings, f"{folder}/out/train.tfrecord")
  shown = capsys.readouterr().out
  assert "huggingface tokenizer.json" in shown
  assert "{" in shown and "Ġ" not in shown


@pytest.mark.slow
def test_from_text_to_answers(trained, tmp_path):
  """Records, 20 updates, a Hugging Face folder and back: one vocabulary."""
  samples.create(
    tmp_path, f"{trained}/text.txt", None, objective="mlm", dynamic_masks=True,
    tokenizer_file=f"{trained}/tokenizer.json",
  )  # fmt: skip
  # The run keeps its own copy of what is beside the records.
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(trained / name, tmp_path / "out" / name)
  config = samples.write_config(tmp_path / "config.json", vocab_size=300)
  files = config, f"{tmp_path}/out/train.tfrecord"
  run, theirs = str(tmp_path / "run"), str(tmp_path / "theirs")
  runs.pretrain(files, run, num_train_steps=20, objective=None)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    os.remove(tmp_path / "out" / name)
  for to, model, output in (
    ("huggingface", run, theirs),
    ("tensorflow", theirs, str(tmp_path / "ours" / "m.ckpt")),
  ):
    convert(model, output, to=to)
  with open(f"{theirs}/tokenizer.json", "rb") as f:
    assert f.read() == (trained / "tokenizer.json").read_bytes()
  answers = []
  for model in (run, theirs, str(tmp_path / "ours")):
    source = model_source.find(model)
    opened = inference.open_model(source)
    made = predictions.Predictor(opened, source)
    answers += made.predict([predictions.Input("The cat [MASK]'s.")])
    opened.close()
  assert answers[0] == answers[1] == answers[2]
  words = [found["word"] for found in answers[0].answer["masks"][0]]
  assert words and not any("Ġ" in word for word in words)
