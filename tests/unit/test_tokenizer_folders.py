"""Hugging Face's folders: their tokenizers give transformers' ids.

`tokenizer_ids.json` keeps the ids of transformers 4.57.6; 5.24.0 has the same,
but for the mask of those with vocab.json, and alone reads those of `NEW`.
"""

import json
import pathlib

import numpy as np
import pytest
import samples
import tokenizer_folders
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizer_folders import BERTS, FOLDERS, MASKED, PAIR, TEXTS, WORDS
from tokenizers import Tokenizer, processors

from common import json_files
from common.errors import DataError
from finetuning import windows, words
from interop import model_source
from records import tfrecord
from text_encoders import base, kinds, tokenizer_files
from text_encoders.tokenizer_json import HuggingFaceEncoder
from text_encoders.wordpiece import word_spans

KEPT = json.loads(
  pathlib.Path(tokenizer_folders.__file__)
  .with_name("tokenizer_ids.json")
  .read_text()
)
# transformers adds no special tokens for these; a BERT always has them.
WITHOUT_TEMPLATE = (
  "wordpiece without template", "bpe without template", "bpe that trims alone",
)  # fmt: skip


NEW = (
  "class of transformers 5", "entity marks of transformers 5",
  "roberta without template",
)  # fmt: skip


def file_of(name):
  """tokenizer.json, or the file that stands for it."""
  return next(iter(FOLDERS[name]))


def encoder_of(folder, name):
  tokenizer_folders.write(folder, name)
  return HuggingFaceEncoder(str(folder / file_of(name)))


def ids_of(encoder):
  """What `KEPT` has of a folder."""

  def joined(*texts):
    return windows.join(encoder, *texts)[0].tolist()

  return {
    "single": [joined(ids) for ids in encoder.encode_batch(TEXTS)],
    "pair": joined(*encoder.encode_batch(PAIR)),
    "mask": joined(encoder.encode_with_masks(MASKED)),
  }


def word_ids(encoder, space_before=True):
  (window,) = words.encode_words(encoder, [WORDS], 64, 32, space_before)
  return window.ids.tolist()


def with_default_template(kept, encoder):
  cls, sep = [encoder.cls_id], [encoder.sep_id]
  (first, second) = encoder.encode_batch(PAIR)
  return {
    "single": [cls + ids + sep for ids in kept["single"]],
    "pair": [*cls, *first, *sep, *second, *sep],
    "mask": cls + kept["mask"] + sep,
  }


def publish(encoder, folder, name):
  """What convert_checkpoint.py writes of an encoder."""
  folder.mkdir()
  for file, content in encoder.files(encoder.usual_name).items():
    (folder / file).write_bytes(content)
  config = json.dumps(FOLDERS[name]["config.json"])
  (folder / "config.json").write_text(config)
  tokenizer_files.write_tokenizer(str(folder), encoder, 64)
  return Tokenizer.from_file(f"{folder}/tokenizer.json")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_and_written_as_transformers_does(tmp_path, name):
  encoder = encoder_of(tmp_path / "read", name)
  ids, want = ids_of(encoder), KEPT[name]
  if encoder.has_default_template:
    _, lines = tokenizer_files.load({"tokenizer_file": encoder.file}, None)
    assert "it adds no special tokens" in lines[0]
    if name in WITHOUT_TEMPLATE:
      assert ids["single"] != want["single"]
      want = with_default_template(want, encoder)
  assert ids == want
  # Words of a text have its tokens, as in transformers' pipeline.
  for text, tokens in zip(TEXTS, ids["single"], strict=True):
    of_words = words.tokens_in_text(encoder, text, word_spans(text))
    (window,) = words.encode_words(encoder, [of_words], 64, 32)
    assert window.ids.tolist() == tokens
  # What is published alone gives these ids, without its config beside it.
  library = publish(encoder, tmp_path / "written", name)
  mask = encoder.special["mask"]
  assert ids == {
    "single": [library.encode(text).ids for text in TEXTS],
    "pair": library.encode(*PAIR).ids,
    "mask": library.encode(MASKED.replace("[MASK]", mask)).ids,
  }
  _, segments = windows.join(encoder, *encoder.encode_batch(PAIR))
  assert library.encode(*PAIR).type_ids == segments.tolist()
  # To those who trained elsewhere, words are what it makes of each alone.
  split = library.encode(WORDS, is_pretokenized=True)
  assert split.ids == word_ids(encoder, space_before=False)
  again = HuggingFaceEncoder(str(tmp_path / "written" / "tokenizer.json"))
  assert ids_of(again) == ids
  # Of a model of words each word has its tokens after a space.
  spaced = encoder.with_space_before()
  library = publish(spaced, tmp_path / "words", name)
  split = library.encode(WORDS, is_pretokenized=True)
  assert split.ids == word_ids(encoder) == word_ids(spaced)
  # A copy, as in a run's folder, says the same by itself.
  copy = tmp_path / "copy"
  copy.mkdir()
  for file, content in encoder.files(file_of(name)).items():
    (copy / file).write_bytes(content)
  assert ids_of(HuggingFaceEncoder(str(copy / file_of(name)))) == ids


@pytest.mark.parametrize("part", ["read", "written", "words"])
def test_transformers_reads_the_same(tmp_path, part, peer):
  """The kept ids, of the installed version; and what is written."""
  jobs, encoders = [], {}
  for number, name in enumerate(FOLDERS):
    folder = tmp_path / str(number)
    encoders[name] = encoder = encoder_of(folder / "read", name)
    publish(encoder, folder / "written", name)
    publish(encoder.with_space_before(), folder / "words", name)
    jobs.append(["encode", str(folder / part), str(folder / "ids.json")])
  texts = {"single": TEXTS, "pair": PAIR, "mask": MASKED, "words": WORDS}
  for _, folder, _ in jobs:
    json_files.write(f"{folder}/texts.json", texts)
  peer(jobs)
  for name, (_, _, file) in zip(FOLDERS, jobs, strict=True):
    result = json.loads(pathlib.Path(file).read_text())
    if result.pop("version") < "5" and part == "read" and name in NEW:
      continue
    if part == "words":
      assert result["words"] == word_ids(encoders[name]), name
      continue
    split = result.pop("words")
    if isinstance(split, list) and name not in WITHOUT_TEMPLATE:
      assert split == word_ids(encoders[name], space_before=False), name
    want = KEPT[name] if part == "read" else ids_of(encoders[name])
    if part == "read" and "vocab.json" in name:
      # transformers 5 keeps the space before the mask as a token.
      del result["mask"], want["mask"]
    assert result == want, name


def test_a_model_of_vocab_json_and_merges(tmp_path):
  tokenizer_folders.write(tmp_path, "roberta, vocab.json alone")
  (tmp_path / "model.safetensors").touch()
  files = model_source.find_vocabulary({}, {}, str(tmp_path))
  assert files == {"tokenizer_file": str(tmp_path / "vocab.json")}
  assert kinds.load_tokenizer(**files).special["mask"] == "<mask>"
  herbert = {"model_type": "bert", "tokenizer_class": "HerbertTokenizerFast"}
  json_files.write(str(tmp_path / "tokenizer_config.json"), herbert)
  with pytest.raises(DataError, match="of HerbertTokenizerFast, not RoBERTa's"):
    kinds.load_tokenizer(**files)


def test_marks_of_the_users_are_no_google_berts(tmp_path):
  """google/bert's rules would split them."""
  path = samples.write_vocabulary(tmp_path / "vocab.txt", [*BERTS, "[E1]", "a"])
  assert tokenizer_files.fits(path)
  said = {"additional_special_tokens": ["[E1]"], "do_lower_case": True}
  json_files.write(str(tmp_path / "tokenizer_config.json"), said)
  assert not tokenizer_files.fits(path)


def test_a_template_counts_beside_a_vocabulary(tmp_path):
  """Of a WordPiece whose pieces are google/bert's; AutoTokenizer has it."""
  path = samples.write_vocabulary(tmp_path / "vocab.txt", [*BERTS, "a", "b"])
  encoder = kinds.load_tokenizer(path)
  tokenizer_files.write_tokenizer(str(tmp_path), encoder, 64)
  assert tokenizer_files.fits(path)
  library = Tokenizer.from_file(f"{tmp_path}/tokenizer.json")
  library.post_processor = processors.RobertaProcessing(
    ("[SEP]", 3), ("[CLS]", 2)
  )
  library.save(f"{tmp_path}/tokenizer.json")
  (tmp_path / "config.json").write_text("{}")
  (tmp_path / "model.safetensors").touch()
  files = model_source.find_vocabulary({}, {}, str(tmp_path))
  template = kinds.load_tokenizer(**files).template(2)
  assert [ids.tolist() for ids in template] == [[2], [3, 3], [3]]


def test_a_piece_that_the_user_defined_is_text_if_it_is_special(tmp_path):
  model = ModelProto()
  types = dict.fromkeys(base.SPECIAL_TOKENS, model.SentencePiece.USER_DEFINED)
  types |= {base.UNK: 2, "\u2581": 1, "[E1]": model.SentencePiece.USER_DEFINED}
  types |= dict.fromkeys("SEP[]a", 1)
  for piece, kind in types.items():
    model.pieces.add(piece=piece, type=kind, score=-1.0)
  model.trainer_spec.unk_id = 1
  path = tmp_path / "spiece.model"
  path.write_bytes(model.SerializeToString())
  encoder = kinds.load_tokenizer(spm_model_file=str(path), do_lower_case=False)
  ids = encoder.encode_batch(["a[SEP]a[E1]"])[0]
  tokens = [encoder.tokens[i] for i in ids]
  assert tokens == ["\u2581", "a", *"[SEP]", "a", "[E1]"]
  masked = encoder.encode_with_masks("a [MASK]").tolist()
  assert masked == [*encoder.encode_batch(["a"])[0], encoder.mask_id]


def test_pairs_in_records_have_the_template(tmp_path):
  """Two separators between RoBERTa's texts, one after a sequence of one."""
  encoder = encoder_of(tmp_path / "folder", "roberta")
  lines = ["The cat sees the dog.", "the dogs.", "The cat.", "a dog sees."]
  text = tmp_path / "t.txt"
  text.write_text("\n\n".join(["\n".join(lines), "\n".join(lines[::-1])] * 3))
  for objective, between in (("mlm_nsp", 2), ("mlm", 0)):
    summary = samples.create(
      tmp_path / objective, str(text), tokenizer_file=encoder.file,
      vocab_file=None, objective=objective, dynamic_masks=True,
      max_seq_length=24, short_seq_prob=0.1,
    )  # fmt: skip
    folder = pathlib.Path(summary.manifest_path).parent
    for record in tfrecord.RecordSet([*map(str, folder.glob("*.tfrecord"))]):
      row = samples.feature_values(record)
      ids = np.array(row["input_ids"])[np.array(row["input_mask"]) > 0]
      ends = np.flatnonzero(ids == encoder.sep_id)
      assert ids[0] == encoder.cls_id and ends[-1] == len(ids) - 1
      assert len(ends) == between + 1 and (np.diff(ends[:2]) == 1).all()
