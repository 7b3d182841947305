"""Text to ids by a SentencePiece model."""

import math
from collections.abc import Sequence

import numpy as np
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Regex, Tokenizer, normalizers

from common import input_files
from common.errors import DataError
from text_encoders import base
from text_encoders.characters import has_chinese, without_surrogates
from text_encoders.wordpiece import FINAL_SIGMA


def _check_model(model) -> None:
  """Raises `ValueError` for what makes the library end the process."""
  pieces = set()
  for piece in model.pieces:
    if "\0" in piece.piece or not math.isfinite(piece.score):
      raise ValueError("a piece has a NUL or no finite score")
    if piece.piece in pieces:  # the library knows the first
      raise ValueError("a piece is in it twice")
    pieces.add(piece.piece)
  for spec in (model.normalizer_spec, model.denormalizer_spec):
    table = spec.precompiled_charsmap
    if not table:
      continue
    # The table is the size of a trie in bytes, the trie's units
    # (https://github.com/s-yata/darts-clone) and strings that end with a NUL,
    # to whose beginnings the leaves point.
    size = int.from_bytes(table[:4], "little")
    trie, strings = table[4 : 4 + size], table[4 + size :]
    # All leaves and offsets must stay inside, since the library checks none.
    is_whole = 0 < size == len(trie) and size % 1024 == 0
    units = np.frombuffer(trie[: len(trie) // 4 * 4], "<u4").astype(np.int64)
    leaves = units[units >= 1 << 31] - (1 << 31)
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    farthest = (np.arange(len(units)) ^ offsets) | 0xFF
    inner = farthest[units < 1 << 31]
    if (
      not (is_whole and strings.endswith(b"\0"))
      or inner.max(initial=0) >= len(units)
      or leaves.max(initial=0) >= len(strings)
    ):
      raise ValueError("its table of normalization is damaged")


class SentencePieceEncoder(base.Encoder):
  """Lines -> ids of a SentencePiece model; U+2581 begins a word.

  Special tokens have BERT's names or ALBERT's (<pad>, <unk>).
  """

  kind, flag, usual_name = "sentencepiece", "spm_model_file", "spiece.model"
  marks_spaces, mark = True, base.SENTENCEPIECE_SPACE

  def __init__(self, model_file: str, do_lower_case: bool):
    import sentencepiece
    from google.protobuf.message import DecodeError

    super().__init__(model_file, do_lower_case)
    special = {}
    try:
      self._proto = model = ModelProto.FromString(input_files.read(model_file))
      _check_model(model)
      tokens = [piece.piece for piece in model.pieces]
      for role, token in base.SPECIAL_BY_ROLE.items():
        alberts = f"<{role}>"
        is_alberts = alberts in tokens and token not in tokens
        special[role] = alberts if is_alberts else token
      # Symbols that the user defined are tokens in a text, too, which special
      # tokens never are.
      for piece in model.pieces:
        if piece.type == piece.USER_DEFINED and piece.piece in special.values():
          piece.type = piece.CONTROL
      self._model = sentencepiece.SentencePieceProcessor(
        model_proto=model.SerializeToString()
      )
    except (DecodeError, RuntimeError, ValueError) as e:
      raise DataError(f"{model_file}: not a SentencePiece model: {e}") from e
    self._set_vocabulary(tokens, special, tokens)

  def encode_batch(self, lines: Sequence[str]) -> list[np.ndarray]:
    encoded = self._model.encode([self._clean(line) for line in lines])
    return [np.array(ids, np.int32) for ids in encoded]

  def encode_rest(self, text: str) -> np.ndarray:
    # The library begins a line with a space: after a character that no piece
    # has, only a space in the text is one.
    pieces = self._pieces(f"\ue000{text}")
    return np.array([token for token, _, end in pieces if end > 1], np.int32)

  def _pieces(self, line: str) -> list[tuple]:
    """(id, begin, end) of each token, in characters of the encoded line."""
    encoded = self._model.encode_as_immutable_proto(self._clean(line))
    return [(piece.id, piece.begin, piece.end) for piece in encoded.pieces]

  def _clean(self, line):
    line = without_surrogates(line)
    return line.lower() if self.do_lower_case else line

  def encode_words(self, lines: Sequence[str]) -> list[base.WordTokens]:
    words = []
    for line, ids in zip(lines, self.encode_batch(lines), strict=True):
      # What is unknown has no mark of its own that a word begins.
      continues = self.is_continuation[ids] | (ids == self.unk_id)
      if has_chinese(line):
        # jieba reads the text that the pieces spell, with spaces for marks.
        text, starts = "", []
        for piece in self._model.encode(self._clean(line), out_type=str):
          starts.append(len(text))
          text += piece.replace(base.SENTENCEPIECE_SPACE, " ")
        continues = base.inside_chinese_words(text, starts)
      words.append(base.WordTokens(ids, continues))
    return words

  def encode_with_spans(self, text: str) -> base.TokenSpans:
    # Lower-casing may give several characters for one, so these are positions
    # in the text of the encoded line's characters.
    positions: list[int] = []
    for position, char in enumerate(text):
      size = len(char.lower() if self.do_lower_case else char)
      positions += [position] * size
    positions.append(len(text))
    shown = set()  # characters that tokens show
    for char in set(text):
      for token, _, _ in self._pieces(char):
        if self.tokens[token].strip(self.mark):
          shown.add(char)
    spans = []
    for token, begin, end in self._pieces(text):
      # A piece may begin with the space before its word. If a character gives
      # several pieces (an ellipsis gives three), only the last has it.
      inside = []
      if self.tokens[token].strip(self.mark):
        for position in positions[begin : max(end, begin + 1)]:
          if position < len(text) and text[position] in shown:
            inside.append(position)
      if inside:
        spans.append((token, inside[0], inside[-1] + 1))
      else:
        spans.append((token, positions[begin], positions[begin]))
    return base.TokenSpans.of(spans)

  def library_tokenizer(self) -> Tokenizer:
    # It differs from the encoder where a letter has several combining marks,
    # of which the library loses some, and between equally likely segmentations
    # (". .." and ".. .").
    model = self._proto
    trainer, normalization = model.trainer_spec, model.normalizer_spec
    if not (
      {piece.type for piece in model.pieces}
      <= {1, 2, 3}  # also unknown, control
      and trainer.model_type == trainer.UNIGRAM
      and not trainer.treat_whitespace_as_suffix
      and not trainer.byte_fallback
      and normalization.add_dummy_prefix
      and normalization.remove_extra_whitespaces
      and normalization.escape_whitespaces
    ):
      raise DataError(
        f"{self.file}: not a unigram model as tools.train_tokenizer makes it "
        "(BPE, bytes, symbols of the user's, or another use of spaces): "
        "tokenizer.json would give other ids. Convert with --to=tensorflow, "
        "and the checkpoint that it writes without this file beside it"
      )
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    tokenizer = Tokenizer(tokenizers.models.Unigram(pieces, unk_id=self.unk_id))
    steps = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    charsmap = normalization.precompiled_charsmap
    if charsmap:
      steps = [normalizers.Precompiled(charsmap), *steps]
    if self.do_lower_case:
      steps = [FINAL_SIGMA, normalizers.Lowercase(), *steps]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    return tokenizer
