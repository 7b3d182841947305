"""Tests a model's grammar: which sentence of a minimal pair is more likely?

  python -m tools.evaluate_grammar runs/first --pairs='blimp/data/*.jsonl'
  python -m tools.evaluate_grammar runs/first --pairs='p/*.jsonl' --sample=200
  horovodrun -np 2 python -m tools.evaluate_grammar runs/first --pairs=p.jsonl

MODEL is a run folder, a checkpoint's name, a Hugging Face folder or an exported
folder, with a masked LM head. A pair is right if the model gives its good
sentence the higher pseudo-log-likelihood. Several ranks share the sentences.
"""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Sequence

import numpy as np

from checkpoints import description
from common import input_files, json_files, processes
from common import tensorflow_v1 as later
from common.console import Progress, say
from common.errors import DataError, UserError
from common.settings import in_group, run_with, setting
from config.precision import TYPES
from interop import minimal_pairs, model_source
from records import data_set, tfrecord, unigrams
from text_encoders.base import Encoder

RESULTS_FILE = "grammar_results.json"
_WITHIN_WORD = "within_word"
_data, _scores = in_group("Data"), in_group("Scores")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What to compare, and how; the names are the flags'."""

  # fmt: off
  pairs: str = setting(help=
    "Files with minimal pairs, names and globs: tables, as BLiMP's JSON lines "
    "(sentence_good, sentence_bad, UID, field, linguistics_term).")
  sample: int | None = _data(None,
    "Number of pairs of each paradigm to compare, always the same ones. "
    "Default: all.", low=1)
  unigram_records: str | None = _data(None,
    "Record files, names and globs, whose tokens are counted for the unigram "
    "baseline. Default: those that the run was trained on.")
  output: str | None = setting(None,
    f"JSON file for the results. Default: {RESULTS_FILE} in the run folder, "
    "or none where no run folder can be written.", group="Output")
  score: str = _scores(_WITHIN_WORD,
    "What is masked with the token that is scored. within_word: the later "
    "pieces of its word. original: nothing else.",
    choices=(_WITHIN_WORD, "original"))
  precision: str = _scores("fp32",
    "Type of the matrix multiplications of a model that is not exported. bf16 "
    "is faster on CPUs with AVX512-BF16.",
    choices=TYPES)
  parts: model_source.Given = setting(
    model_source.NOTHING_GIVEN, group="Parts of the model")
  # fmt: on


def encode(
  pairs: Sequence[minimal_pairs.Pair], encoder: Encoder, most: int
) -> tuple[list[np.ndarray], np.ndarray]:
  """Distinct sentences, int32 [n] each; int [pairs, 2], their numbers.

  Sentences with the same tokens are one. DataError for more than `most` tokens,
  [CLS] and [SEP] included, or none.
  """
  texts: list[str] = []
  for pair in pairs:
    texts += [pair.good, pair.bad]
  distinct: dict[bytes, int] = {}  # a sentence's tokens -> its number
  sentences: list[np.ndarray] = []
  numbers: list[int] = []
  room = most - sum(map(len, encoder.template(1)))
  for at, ids in enumerate(encoder.encode_batch(texts)):
    if not 1 <= len(ids) <= room:
      raise DataError(
        f"{pairs[at // 2].where}: {texts[at][:50]!r} has {len(ids)} tokens, "
        f"but the model reads 1 to {room}: take the pair out"
      )
    number = distinct.setdefault(ids.tobytes(), len(sentences))
    if number == len(sentences):
      sentences.append(ids)
    numbers.append(number)
  return sentences, np.array(numbers).reshape(-1, 2)


def count_unigrams(
  settings: Settings, source: model_source.Source, encoder, comm
) -> tuple[np.ndarray | None, str]:
  """(int64 [V], how often each token occurs, or None; a line about it)."""
  if settings.unigram_records:
    paths = input_files.expand_patterns(settings.unigram_records)
  else:
    paths = source.about.records_now()
  if not paths:
    return None, (
      f"no unigram baseline: {source.folder} does not say on which records it "
      "was trained, or they are not as it read them: give --unigram_records"
    )
  # Counts of other tokens would be no baseline for this model.
  for path, manifest in data_set.find_manifests(paths).values():
    if not manifest.tokenizer.is_like(encoder.info()):
      raise UserError(
        f"{path}: its records are of another vocabulary or case than the "
        f"model's {encoder.file}: give --unigram_records that fit"
      )
  files = tfrecord.RecordSet(paths)
  # A sample of the records is enough; each rank counts a part of it.
  chosen = unigrams.numbers(files)
  my_share = chosen[comm.rank :: comm.size]
  special = encoder.pad_id, encoder.cls_id, encoder.sep_id
  with Progress("counting", len(my_share), "records", comm=comm) as bar:
    size = source.bert.vocab_size
    features = unigrams.features_of(files, size)
    sequences = unigrams.texts(files, my_share, features, bar.at)
    counts = unigrams.count(sequences, size, special)
  counts = comm.gather(counts).sum(axis=0)
  return counts, (
    f"unigram baseline: {counts.sum():,} tokens of {len(chosen):,} of the "
    f"{len(files):,} records in {len(paths)} files, such as {paths[0]}"
  )


def evaluate(settings: Settings, name: str, comm) -> None:
  """Scores the pairs by the model `name`; rank 0 prints and writes results."""
  pairs = minimal_pairs.read(settings.pairs, settings.sample)
  # Rank 0 alone chooses the checkpoint, because a run may be saving others.
  source = model_source.find(name, settings.parts) if comm.is_root else None
  source = comm.from_root(source)
  output, encoder = settings.output, source.tokenizer()
  is_run = os.path.exists(os.path.join(source.folder, description.RUN_FILE))
  if output is None and is_run and os.access(source.folder, os.W_OK):
    output = os.path.join(source.folder, RESULTS_FILE)
  if output:
    os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
  most = source.bert.max_position_embeddings
  sentences, numbers = encode(pairs, encoder, most)
  digest = hashlib.sha256(b"|".join(ids.tobytes() for ids in sentences))
  # Ranks that read other files would wait for each other without an end.
  comm.check_equal(
    "the work",
    f"{source.path}\n{settings.score}, {settings.precision}\n"
    f"{len(sentences)} sentences of SHA-256 {digest.hexdigest()}",
  )
  paradigms = len(minimal_pairs.by_paradigm(pairs))
  line = f"{len(pairs):,} pairs of {paradigms} paradigms: "
  line += f"{len(sentences):,} different sentences"
  say(comm, *source.lines(), line)
  trained = source.max_seq_length
  longer = sum(len(ids) + 2 > trained for ids in sentences)
  if longer:
    say(
      comm,
      f"{longer:,} sentences have more than the {trained} tokens of the "
      "model's training: positions at their end were not trained",
    )
  from interop import inference, pseudo_likelihood  # these load TensorFlow

  model = inference.open_model(source, ["masked_lm"], settings.precision)
  with contextlib.closing(model):
    scorer = pseudo_likelihood.Scorer(
      model, encoder, within_word=settings.score == _WITHIN_WORD
    )
    counts, baseline = count_unigrams(settings, source, encoder, comm)
    say(comm, baseline)
    scores = scorer.score(sentences, comm)[numbers]
  if not comm.is_root:
    return
  unigram = None
  if counts is not None:
    unigram = unigrams.log_likelihoods(counts, sentences)[numbers]
  results = minimal_pairs.results(pairs, scores, unigram)
  print("\n".join(minimal_pairs.table(results)), flush=True)
  if output:
    about = {
      "model": source.path, "score": settings.score,
      "precision": settings.precision, "sample": settings.sample,
      "from": settings.pairs, "sentences_sha256": digest.hexdigest(),
      "baseline": baseline,
    }  # fmt: skip
    json_files.write(output, {**about, **results})
    print(output)


def main(settings: Settings, name: str) -> None:
  """Evaluates on all ranks."""
  # What is missing is an error before TensorFlow takes its time.
  input_files.expand_patterns(settings.pairs)
  if not processes.started()[0]:
    model_source.find(name, settings.parts)
  from gradients import distributed

  try:
    evaluate(settings, name, distributed.init())
  except later.tf.errors.OpError as e:
    raise distributed.rank_lost(e) or e from e


if __name__ == "__main__":
  run_with(Settings, main, arguments=1)
