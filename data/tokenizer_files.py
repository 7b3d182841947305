"""Hugging Face's tokenizer files from our vocabulary.

transformers' BertTokenizer allows words of 100 characters at most, google/bert
200. So the folder names its general class, which follows tokenizer.json.
"""

import os

from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
  AddedToken,
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

import tokenization
from common import files, input_files, json_files
from common.errors import DataError
from common.model_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

_SPECIAL = ("pad", "unk", "cls", "sep", "mask")

# str.lower makes a capital sigma at a word's end another letter than elsewhere
# (Unicode 3.13, Final_Sigma); the library lower-cases letter by letter.
_CASED, _IGNORED = r"[\p{Lu}\p{Ll}\p{Lt}]", r"[\p{M}\p{Cf}\p{Lm}\p{Sk}'’.:·]"
_FINAL_SIGMA = normalizers.Replace(
  Regex(
    f"(?<={_CASED}|{_CASED}{_IGNORED}|{_CASED}{_IGNORED}{_IGNORED})"
    f"Σ(?!{_IGNORED}*{_CASED})"
  ),
  "ς",
)


def normalizer(do_lower_case: bool):
  """Cleans text as google/bert does."""
  bert = normalizers.BertNormalizer(
    clean_text=True,
    handle_chinese_chars=True,
    strip_accents=do_lower_case,
    lowercase=do_lower_case,
  )
  return normalizers.Sequence([_FINAL_SIGMA, bert]) if do_lower_case else bert


def make_tokenizer(
  encoder: tokenization.Encoder, segment_ids: bool = True
) -> Tokenizer:
  """A tokenizer with the ids of an encoder.

  Without `segment_ids` the second text of a pair is of segment 0, too. Unlike
  the encoder it reads "[MASK]" and other special tokens in a text as tokens.
  """
  make = _sentencepiece_tokenizer
  if isinstance(encoder, tokenization.WordPieceEncoder):
    make = _wordpiece_tokenizer
  tokenizer = make(encoder)
  special = special_tokens(encoder)
  _, _, cls, sep, _ = special
  second = int(segment_ids)
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{cls}:0 $A:0 {sep}:0",
    pair=f"{cls}:0 $A:0 {sep}:0 $B:{second} {sep}:{second}",
    special_tokens=[(cls, int(encoder.cls_id)), (sep, int(encoder.sep_id))],
  )
  tokenizer.add_special_tokens(
    [AddedToken(token, normalized=False, special=True) for token in special]
  )
  return tokenizer


def special_tokens(encoder: tokenization.Encoder) -> list[str]:
  """[PAD], [UNK], [CLS], [SEP] and [MASK], which ALBERT names otherwise."""
  return [encoder.tokens[getattr(encoder, f"{name}_id")] for name in _SPECIAL]


def _wordpiece_tokenizer(encoder: tokenization.Encoder) -> Tokenizer:
  """Differs from the encoder in rare characters: Unicode tables differ."""
  tokenizer = Tokenizer(
    models.WordPiece(
      vocab=dict(tokenization.load_vocab(encoder.file)),
      unk_token=tokenization.UNK,
      max_input_chars_per_word=tokenization.MAX_INPUT_CHARS_PER_WORD,
    )
  )
  tokenizer.normalizer = normalizer(encoder.do_lower_case)
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  tokenizer.decoder = decoders.WordPiece(prefix="##")
  return tokenizer


def _sentencepiece_tokenizer(encoder: tokenization.Encoder) -> Tokenizer:
  """Differs from the encoder where a letter has several combining marks.

  The library loses some of them. It also chooses otherwise between equally
  likely segmentations (". .." and ".. .").
  """
  content = input_files.read(encoder.file)
  model = sentencepiece_model_pb2.ModelProto.FromString(content)
  trainer, normalization = model.trainer_spec, model.normalizer_spec
  if not (
    {piece.type for piece in model.pieces} <= {1, 2, 3}  # also unknown, control
    and trainer.model_type == trainer.UNIGRAM
    and not trainer.treat_whitespace_as_suffix
    and not trainer.byte_fallback
    and normalization.add_dummy_prefix
    and normalization.remove_extra_whitespaces
    and normalization.escape_whitespaces
  ):
    raise DataError(
      f"{encoder.file}: not a unigram model as tools.train_tokenizer makes it "
      "(BPE, bytes, symbols of the user's, or another use of spaces): "
      "tokenizer.json would give other ids. Convert with --to=tensorflow, and "
      "the checkpoint that it writes without this file beside it"
    )
  pieces = [(piece.piece, piece.score) for piece in model.pieces]
  tokenizer = Tokenizer(models.Unigram(pieces, unk_id=int(encoder.unk_id)))
  steps = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
  if charsmap := normalization.precompiled_charsmap:
    steps = [normalizers.Precompiled(charsmap), *steps]
  if encoder.do_lower_case:
    steps = [_FINAL_SIGMA, normalizers.Lowercase(), *steps]
  tokenizer.normalizer = normalizers.Sequence(steps)
  space = dict(
    replacement=tokenization.SENTENCEPIECE_SPACE, prepend_scheme="always"
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**space)
  tokenizer.decoder = decoders.Metaspace(**space)
  return tokenizer


def write_tokenizer(
  folder: str,
  encoder: tokenization.Encoder,
  max_length: int,
  segment_ids: bool = True,
) -> None:
  """Writes tokenizer.json and tokenizer_config.json."""
  tokenizer = make_tokenizer(encoder, segment_ids)
  # tokenizer.save() raises a bare Exception on a full disk.
  path = os.path.join(folder, TOKENIZER_FILE)
  files.write(path, tokenizer.to_str(pretty=True).encode())
  names = [f"{name}_token" for name in _SPECIAL]
  content = {
    **dict(zip(names, special_tokens(encoder), strict=True)),
    "do_lower_case": encoder.do_lower_case,
    "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    "model_max_length": max_length,
    "tokenizer_class": "PreTrainedTokenizerFast",
  }
  json_files.write(os.path.join(folder, TOKENIZER_CONFIG_FILE), content)
