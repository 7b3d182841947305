"""What files beside a vocabulary say: its case, and other rules than ours."""

import json
import os
import types

import pytest
import samples
import tokenizers
from samples import LETTERS

from checkpoints import run_folder
from common import json_files
from common.errors import UserError
from text_encoders import kinds, tokenizer_files
from text_encoders.base import SPECIAL_TOKENS, config_beside
from text_encoders.tokenizer_folder import SPECIAL_FILE
from tools import prepare_corpus, train_tokenizer

TOKENS = [*LETTERS, "cat", "The", "é", "。"]
JSON, CONFIG, ADDED = (
  "tokenizer.json", "tokenizer_config.json", "added_tokens.json",
)  # fmt: skip
BERT = {
  "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
  "strip_accents": None, "lowercase": True,
}  # fmt: skip


def write_vocabulary(folder, name="vocab.txt", tokens=TOKENS):
  folder.mkdir(exist_ok=True)
  return samples.write_vocabulary(folder / name, tokens)


def merged(content, changes):
  """JSON with other values; None removes nothing but is written as null."""
  for key, value in changes.items():
    if isinstance(value, dict) and isinstance(content.get(key), dict):
      if "type" not in value:
        value = merged(content[key], value)
    content[key] = value
  return content


def write_folder(folder, lower, files):
  """A vocabulary with our own two files about it, changed: (path, encoder)."""
  path = write_vocabulary(folder)
  encoder = kinds.load_tokenizer(path, lower)
  tokenizer_files.write_tokenizer(str(folder), encoder, 64)
  for name, changes in files.items():
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(merged(content, changes)))
  return path, encoder


def added(content, **more):
  token = dict.fromkeys(["single_word", "lstrip", "rstrip"], False)
  return {
    **token, "normalized": False, "special": False, "content": content, **more,
  }  # fmt: skip


def steps(*normalizers):
  return {"type": "Sequence", "normalizers": [*normalizers]}


CUT = {"strategy": "LongestFirst", "direction": "Right", "stride": 0}
CUT["max_length"] = 8
VOCAB = {token: number for number, token in enumerate(TOKENS)}


# fmt: off
OTHERS = {
  JSON: [
    ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, "pre_tokenizer"),
    ({"pre_tokenizer": None}, "pre_tokenizer is None"),
    ({"normalizer": None}, "normalizer is None"),
    ({"normalizer": steps(BERT, {"type": "NFC"})}, "normalizer"),
    ({"normalizer": {**BERT, "strip_accents": False}}, "strip_accents"),
    ({"normalizer": {**BERT, "handle_chinese_chars": False}}, "normalizer"),
    ({"model": {"type": "BPE", "vocab": {"a": 0}}}, "model.type is 'BPE'"),
    ({"model": {"type": "WordLevel", "vocab": VOCAB}}, "'WordLevel'"),
    ({"model": {"vocab": {"cat": VOCAB["The"], "The": VOCAB["cat"]}}},
     r"others here is \['cat', 'The'\]"),
    ({"model": {"vocab": {"dog": len(TOKENS)}}}, r"others here is \['dog'"),
    ({"added_tokens": [added("[E1]", id=99)]}, r"'\[E1\]'"),
    ({"post_processor": {"type": "RobertaProcessing", "sep": ["[SEP]", 3],
                         "cls": ["[CLS]", 2], "trim_offsets": True,
                         "add_prefix_space": False}}, "around texts is"),
  ],
  ADDED: [({"[E1]": len(TOKENS)}, r"others here is \['\[E1\]'\]")],
  SPECIAL_FILE: [
    ({"additional_special_tokens": ["<e>"]}, "others here is .'<e>'"),
  ],
  CONFIG: [
    ({"never_split": ["[E1]"]}, r"others here is \['\[E1\]'\]"),
    ({"additional_special_tokens": [{"content": "<e>"}]},
     "others here is .'<e>'"),
    ({"extra_special_tokens": {"entity": "<e>"}}, "others here is .'<e>'"),
    ({"added_tokens_decoder": {"3": added("<e>")}}, "others here is .'<e>'"),
    ({"tokenizer_class": "BertJapaneseTokenizer"},
     "tokenizer_class is 'bertjapanese'"),
    ({"do_basic_tokenize": False}, "do_basic_tokenize is False"),
    ({"strip_accents": False}, "strip_accents is False"),
  ],
}
# fmt: on


@pytest.mark.parametrize(
  "file, changes, field",
  [(file, *case) for file, cases in OTHERS.items() for case in cases],
)
def test_other_tokenizers_are_refused_by_their_field(
  tmp_path, file, changes, field
):
  path, _ = write_folder(tmp_path / "a", True, {file: changes})
  with pytest.raises(UserError, match=f"/a/{file}: .*{field}.* give another"):
    tokenizer_files.load({"vocab_file": path}, None)


def test_the_models_config_may_name_the_class(tmp_path):
  """Its type says none: other models may have google/bert's tokens."""
  no_class = {"tokenizer_class": None}
  beside = {CONFIG: no_class, "config.json": {"model_type": "modernbert"}}
  path, _ = write_folder(tmp_path / "a", True, beside)
  tokenizer_files.load({"vocab_file": path}, None)
  beside["config.json"] = {"tokenizer_class": "BertJapaneseTokenizer"}
  path, _ = write_folder(tmp_path / "b", True, beside)
  with pytest.raises(UserError, match="tokenizer_class is 'bertjapanese'"):
    tokenizer_files.load({"vocab_file": path}, None)


@pytest.mark.parametrize("file", [JSON, "vocab.txt"])
@pytest.mark.parametrize(
  "beside",
  [
    {CONFIG: {"tokenizer_class": "RoFormerTokenizerFast"}},
    {
      CONFIG: {"tokenizer_class": None},
      "config.json": {"model_type": "roformer"},
    },
  ],
)
def test_roformers_own_tokenizer_is_refused(tmp_path, file, beside):
  write_folder(tmp_path / "a", True, beside)
  path = str(tmp_path / "a" / file)
  name = "tokenizer_file" if file == JSON else "vocab_file"
  with pytest.raises(UserError, match=f"{file}: RoFormer's .* jieba"):
    tokenizer_files.load({name: path}, None)


@pytest.mark.parametrize(
  "lower, files",
  [
    (True, {}),
    (False, {}),
    # As published, with words of 100 letters at most.
    (True, {
      JSON: {"normalizer": BERT, "truncation": CUT,
             "model": {"max_input_chars_per_word": 100}},
      CONFIG: {"tokenizer_class": "BertTokenizer", "strip_accents": None,
               "never_split": [*SPECIAL_TOKENS],
               "unk_token": {"content": "[UNK]"}, "do_basic_tokenize": True},
    }),
    (False, {JSON: {"normalizer": {**BERT, "lowercase": False}}}),
    # The class sets its own normalizer by its config.
    (True, {JSON: {"normalizer": {**BERT, "strip_accents": False}},
            CONFIG: {"tokenizer_class": "BertTokenizerFast"}}),
    # Of another case there is a line.
    (True, {JSON: {"normalizer": {**BERT, "lowercase": False}}}),
    # Each is a token inside of a word here, too.
    (True, {JSON: {"added_tokens": [added("。", id=VOCAB["。"])]}}),
    (True, {ADDED: {".": VOCAB["."]}}),
  ],
)  # fmt: skip
def test_google_berts_tokenizer_in_other_words(tmp_path, lower, files):
  path, encoder = write_folder(tmp_path, lower, files)
  tokenizer_files.compare(encoder, path)
  theirs = tokenizers.Tokenizer.from_file(str(tmp_path / JSON))
  theirs.no_truncation()
  for text in ("a。b the cats. 12", "。.", "un able"):
    (ids,) = encoder.encode_batch([text])
    assert theirs.encode(text, add_special_tokens=False).ids == ids.tolist()


def test_files_about_another_vocabulary(tmp_path):
  """A folder's files are about vocab.txt."""
  write_folder(tmp_path, True, {JSON: {"pre_tokenizer": None}})
  path = write_vocabulary(tmp_path, "words.txt", TOKENS[:-1])
  encoder, _ = tokenizer_files.load({"vocab_file": path}, None)
  assert encoder.do_lower_case


# Case -------------------------------------------------------------------------

CASED = {"do_lower_case": False}
CASED_JSON = {"normalizer": {**BERT, "lowercase": False}}


@pytest.mark.parametrize(
  "folder, name, files, lower",
  [
    ("a", "vocab.txt", {}, True),
    ("a", "vocab.txt", {CONFIG: CASED}, False),
    ("a", "vocab.txt", {"task.json": CASED}, False),
    ("a", "vocab.txt", {JSON: CASED_JSON}, False),
    # transformers' class sets it by a config that does not say it.
    ("a", "vocab.txt", {JSON: CASED_JSON,
     CONFIG: {"tokenizer_class": "BertTokenizer"}}, True),
    ("a", "vocab.txt", {JSON: {"normalizer": steps(CASED_JSON["normalizer"])}},
     None),
    ("cased_L-12_H-768_A-12", "vocab.txt", {}, False),
    ("a", "words.txt", {"words.txt.tokenizer_config.json": CASED}, False),
    ("a", "words.txt", {"vocab.txt.tokenizer_config.json": CASED}, True),
    ("a", "words.txt", {
      "words.txt.tokenizer_config.json": CASED,
      CONFIG: {"do_lower_case": True}, "task.json": {"do_lower_case": True},
    }, False),
    ("a", "vocab.txt", {CONFIG: {"do_lower_case": True}, "task.json": CASED},
     False),
  ],
)  # fmt: skip
def test_the_case_is_what_files_beside_the_vocabulary_say(
  tmp_path, monkeypatch, folder, name, files, lower
):
  path = write_vocabulary(tmp_path / folder, name)
  for file, content in files.items():
    (tmp_path / folder / file).write_text(json.dumps(content))
  if lower is None:
    with pytest.raises(UserError, match="normalizer is"):
      tokenizer_files.load({"vocab_file": path}, None)
    return
  encoder, lines = tokenizer_files.load({"vocab_file": path}, None)
  assert encoder.do_lower_case is lower
  disagree = name == "vocab.txt" and {"task.json", CONFIG} <= files.keys()
  told = f"do_lower_case=False as {tmp_path}/a/task.json says, against"
  assert (f"{path}: {told} {tmp_path}/a/{CONFIG}" in lines) is disagree
  monkeypatch.chdir(tmp_path / folder)
  # The flag adds what nothing says.
  for file, flag in ((name, None), (path, lower)):
    encoder, _ = tokenizer_files.load({"vocab_file": file}, flag)
    assert encoder.do_lower_case is lower
  if not lower:
    message = "--do_lower_case=True, but .* cased .*"
    with pytest.raises(UserError, match=message):
      tokenizer_files.load({"vocab_file": path}, True)


def test_two_vocabularies_of_one_folder_have_their_own_case(tmp_path):
  names = {"vocab.txt": True, "b.txt": False, "c.txt": True}
  cases = {write_vocabulary(tmp_path, name): names[name] for name in names}
  for path, lower in cases.items():
    json_files.write(config_beside(path), {"do_lower_case": lower})
  for path, lower in cases.items():
    encoder, lines = tokenizer_files.load({"vocab_file": path}, None)
    assert encoder.do_lower_case is lower
    assert not any("says, against" in line for line in lines)


def test_a_cased_vocabulary_with_lower_casing_is_noticed(tmp_path):
  for tokens, given, told in (
    (["The", "Cat", "##é"], True, True),
    (["The", "Cat", "##é"], False, False),
    (["the", "cat", "##e"], None, False),
    (["कु", "मैं", "हिन्दी"], None, True),  # vowels are marks
    (["[unused1]", "[unused2]", "[unused3]", "[unused4]"], None, False),
  ):
    path = write_vocabulary(tmp_path, tokens=[*LETTERS[:45], *tokens])
    _, lines = tokenizer_files.load({"vocab_file": path}, given)
    assert any("give --nodo_lower_case" in line for line in lines) is told


DOCUMENTS = [f"Le Café {i} est fermé. Où est-il allé?" for i in range(40)]


@pytest.mark.parametrize(
  "kind, language, given, lower",
  [
    ("wordpiece", "fr", None, False), ("sentencepiece", "fr", None, False),
    ("wordpiece", "en", None, True), ("sentencepiece", "fr", True, True),
  ],
)  # fmt: skip
def test_text_vocabulary_and_records_have_one_case(
  tmp_path, kind, language, given, lower
):
  """It is given once at most, with the text or with the vocabulary."""
  (tmp_path / "a.txt").write_text("\n\n".join(DOCUMENTS))
  text, words = tmp_path / "corpus", str(tmp_path / "vocab.txt")
  prepare_corpus.prepare(
    prepare_corpus.CorpusSettings(
      output_dir=str(text), corpus=f"{tmp_path}/a.txt", language=language
    )
  )
  train_tokenizer.main(
    train_tokenizer.Settings(
      input_file=f"{text}/*.txt", output_file=words, vocab_size=150,
      tokenizer=kind, do_lower_case=given,
    )
  )  # fmt: skip
  flag = "vocab_file" if kind == "wordpiece" else "spm_model_file"
  files = {"vocab_file": None, flag: words}
  manifest = samples.create(
    tmp_path, f"{text}/train.txt", files.pop("vocab_file"), **files
  ).manifest
  assert manifest.tokenizer.do_lower_case is lower
  assert manifest.counts["unknown_tokens"] == 0
  said = json.loads((tmp_path / CONFIG).read_text())
  assert said["do_lower_case"] is lower
  assert said.get("strip_accents", lower) is lower
  # The copy in a run's folder says it, too.
  folder = str(tmp_path / "run")
  run = types.SimpleNamespace(output_dir=folder, init_checkpoint=None)
  os.mkdir(folder)
  run_folder.keep_vocabulary(run, {"": (words, manifest)})
  copy = {flag: f"{folder}/vocab.txt"}
  encoder, lines = tokenizer_files.load(copy, None)
  assert encoder.do_lower_case is lower and not lines
  again = kinds.load_tokenizer(**copy, do_lower_case=lower)
  both = [e.encode_batch(["Café"])[0].tolist() for e in (encoder, again)]
  assert both[0] == both[1]
