"""Text to records: the same bytes from any workers, google/bert's meaning."""

import dataclasses
import gzip
import itertools
import json
import math
import multiprocessing
import os
import shutil
import time
import unicodedata

import numpy as np
import pytest
import runs
import tokenizer_folders
from samples import (
  LETTERS,
  contents,
  create,
  listing,
  settings_of,
)
from stopping import Stopped, stop_after

import create_pretraining_data
import tokenization
from common import errors
from common.errors import UserError
from common.files import file_sha256
from corpus import text_files
from records import (
  creation,
  data_set,
  masking,
  record_report,
  shards,
  tf_example,
  tfrecord,
  token_store,
)
from text_encoders import kinds
from text_encoders.base import SPECIAL_TOKENS
from workers.pool import Pool

SEQ, PREDICTIONS = 32, 6  # settings_of's


def all_examples(summary):
  folder = os.path.dirname(summary.manifest_path)
  paths = [os.path.join(folder, f.name) for f in summary.manifest.files]
  decoded = map(tf_example.decode_example, tfrecord.RecordSet(paths))
  return [{name: v.tolist() for name, v in row.items()} for row in decoded]


@pytest.fixture
def make_of(tmp_path, letters):
  """Makes records of a text alone; returns their summary."""

  def make(text, **changes):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "t.txt").write_bytes(content)
    return create(
      tmp_path, f"{tmp_path}/t.txt", **{"vocab_file": letters, **changes}
    )

  return make


def test_any_number_of_workers_gives_the_same_bytes(
  tmp_path, make, texts, letters, monkeypatch
):
  """So does the command, which reads in one piece; other seeds give others."""
  monkeypatch.setattr(text_files, "PIECE_BYTES", 1500)  # several pieces
  for number in (1, 3):
    make(out=f"{number}", num_workers=number, num_shards=4)
  words = [
    "create_pretraining_data.py", f"--input_file={texts}",
    f"--vocab_file={letters}", f"--output_file={tmp_path}/2/train.tfrecord",
    "--num_workers=2", "--max_predictions_per_seq=6", "--max_seq_length=32",
    "--num_shards=4", "--dupe_factor=3",
  ]  # fmt: skip
  done = runs.launch(words)
  tokenizing, making = done.stderr.splitlines()
  assert done.returncode == 0 and "  tokenizing: 0.0000 of 0.0" in tokenizing
  assert "  making records: 0.0000 of 0.0" in making
  assert "documents        60\n" in done.stdout
  assert f"manifest         {tmp_path}/2/train.manifest.json" in done.stdout
  made = [contents(tmp_path / number) for number in "123"]
  assert len(made[0]) == 9 and "train.manifest.json" in made[0]
  assert made[0] == made[1] == made[2]
  make(out="seed", random_seed=2, num_shards=4)
  name = "train-00000-of-00004.tfrecord"
  assert (tmp_path / "seed" / name).read_bytes() != made[0][name]


def documents_by_google_rules(paths, tokenizer):
  """Token lists per sentence per document, read line by line."""
  documents = [[]]
  for path in paths:
    for line in open(path, "rb"):
      line = line.decode("utf-8", "ignore").strip()
      if not line:
        documents.append([])
      ids = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(line))
      if ids:
        documents[-1].append(ids)
  return [d for d in documents if d]


def stored_documents(store):
  docs = token_store.open_store(store)
  sentences = np.split(docs.tokens, docs.sentence_offsets[1:-1])
  ends = docs.document_offsets
  return [
    [s.tolist() for s in sentences[first:last]]
    for first, last in itertools.pairwise(ends)
  ]


def info_of(vocab_file):
  info = kinds.load_tokenizer(str(vocab_file), True).info()
  return dataclasses.replace(info, file=str(vocab_file))


def store_of(folder, paths, letters, block_tokens=1 << 20):
  """Tokenizes files into a store; returns its counts."""
  spec = info_of(letters)
  with token_store.StoreWriter(str(folder), len(LETTERS)) as writer:
    for i, piece in enumerate(text_files.split_into_pieces(paths)):
      how = text_files.TextFormat(), spec, False, f"{folder}/{i}.{{}}".format
      (folder / "lease").mkdir(exist_ok=True)
      token_store.tokenize_piece(piece, *how, f"{folder}/lease/done")
      for number in itertools.count():
        if not os.path.exists(f"{folder}/{i}.{number}"):
          break
        writer.append(f"{folder}/{i}.{number}")
    return writer.finish(token_store.load_tokenizer(spec), block_tokens)


@pytest.mark.parametrize("piece_bytes", [1, 7, 40, 1 << 20])
def test_text_is_read_as_google_bert_reads_it(
  tmp_path, letters, monkeypatch, piece_bytes
):
  # Blank lines in a row and with spaces, CRLF, a line of a control character
  # only (no sentence, no document end), U+2028 in a line, no end of line at the
  # file's end: the next file goes on with it.
  one = "\n\nab cd\r\n\x01\nef\n \t \n\r\n\ngh\u2028ij\nkl\n".encode()
  one += b"mn\n\nlast of one"
  (tmp_path / "1.txt").write_bytes(one)
  (tmp_path / "2.txt").write_bytes(b"first of two\n\nend\n\n\n")
  paths = [str(tmp_path / "1.txt"), str(tmp_path / "2.txt")]
  monkeypatch.setattr(text_files, "PIECE_BYTES", piece_bytes)
  counts = store_of(tmp_path, paths, letters)
  want = documents_by_google_rules(paths, tokenization.FullTokenizer(letters))
  assert stored_documents(str(tmp_path)) == want
  assert [len(d) for d in want] == [2, 3, 2, 1]
  assert (counts.documents, counts.sentences) == (4, 8)
  assert counts.tokens == sum(len(s) for d in want for s in d)
  assert counts.text_bytes == sum(os.path.getsize(p) for p in paths)


@pytest.mark.parametrize("whole_words", [False, True])
def test_records_mean_what_google_bert_means(
  tmp_path, make, letters, whole_words
):
  summary = make(do_whole_word_mask=whole_words, num_shards=3)
  tokenizer = tokenization.FullTokenizer(letters)
  (tmp_path / "b").rename(tmp_path / "b.txt")
  lines = [(tmp_path / n).read_text().split("\n") for n in ("a.txt", "b.txt")]
  flat = [t for ls in lines for x in ls for t in tokenizer.tokenize(x)]
  flat = " " + " ".join(flat) + " "
  cls_id, sep_id = (LETTERS.index(t) for t in ("[CLS]", "[SEP]"))
  examples = all_examples(summary)
  for e in examples:
    n = sum(e["input_mask"])
    assert e["input_mask"] == [1] * n + [0] * (SEQ - n)
    ids, k = list(e["input_ids"]), int(sum(e["masked_lm_weights"]))
    assert ids[n:] == [0] * (SEQ - n)
    assert e["masked_lm_weights"] == [1.0] * k + [0.0] * (PREDICTIONS - k)
    positions = e["masked_lm_positions"]
    assert positions[k:] == e["masked_lm_ids"][k:] == [0] * (PREDICTIONS - k)
    assert sorted(set(positions[:k])) == positions[:k]
    limit = min(PREDICTIONS, max(1, round(n * 0.15)))
    assert k <= limit if whole_words else k == limit
    for position, label in zip(positions[:k], e["masked_lm_ids"], strict=False):
      assert label not in (cls_id, sep_id)
      ids[position] = label
    start_b = n - sum(e["segment_ids"])
    assert e["segment_ids"] == (
      [0] * start_b + [1] * (n - start_b) + [0] * (SEQ - n)
    )
    assert ids[0] == cls_id and ids[start_b - 1] == ids[n - 1] == sep_id
    a, b = ids[1 : start_b - 1], ids[start_b : n - 1]
    for segment in (a, b):  # what was cut out stands so in the text
      tokens = " ".join(tokenizer.convert_ids_to_tokens(segment))
      assert segment and f" {tokens} " in flat
  c = summary.manifest.counts
  assert c["examples"] == len(examples)
  assert c["real_tokens"] == sum(sum(e["input_mask"]) for e in examples)
  masked = sum(int(sum(e["masked_lm_weights"])) for e in examples)
  assert c["masked_tokens"] == masked
  random = sum(e["next_sentence_labels"][0] for e in examples)
  assert c["random_next"] == random and 0.3 < random / len(examples) < 0.9
  assert (c["documents"], c["tokens"]) == (60, len(flat.split()))


def unpacked(record):
  """Of each example: tokens before masking, segments, masked tokens, label."""
  numbers, ids = np.array(record["input_mask"]), np.array(record["input_ids"])
  masked = np.zeros(len(ids), bool)
  for position, label, weight in zip(
    record.get("masked_lm_positions", []),
    record.get("masked_lm_ids", []),
    record.get("masked_lm_weights", []),
    strict=True,
  ):
    if weight:
      ids[position], masked[position] = label, True
  for number in range(1, max(numbers) + 1):
    places = np.flatnonzero(numbers == number)
    assert (np.diff(places) == 1).all()
    yield (
      ids[places].tolist(),
      np.array(record["segment_ids"])[places].tolist(),
      int(masked[places].sum()),
      record["next_sentence_labels"][number - 1],
    )


def test_packed_records_hold_the_same_examples(make):
  made = {}
  for size in (1, 4):
    summary = make(examples_per_record=size, short_seq_prob=0.9, num_shards=2)
    rows = all_examples(summary)
    assert {len(r["next_sentence_labels"]) for r in rows} == {size}
    made[size] = sorted(e for r in rows for e in unpacked(r))
    counts = summary.manifest.counts
    assert counts["examples"] == len(made[size])
    assert summary.manifest.packing_factor == len(made[size]) / len(rows)
    real = sum(np.count_nonzero(r["input_mask"]) for r in rows)
    assert counts["real_tokens"] == real
  assert made[4] == made[1]
  assert real / (len(rows) * SEQ) > 0.9


@pytest.mark.parametrize("whole_words", [False, True])
def test_masks_are_left_to_training(make, whole_words):
  made = {}
  words = dict(do_whole_word_mask=whole_words, examples_per_record=2)
  for dynamic in (False, True):
    summary = make(dynamic_masks=dynamic, **words)
    rows = all_examples(summary)
    made[dynamic] = [e[:2] + e[3:] for r in rows for e in unpacked(r)]
  assert made[True] == made[False]
  manifest = summary.manifest
  assert manifest.masking == "dynamic" and manifest.counts["masked_tokens"] == 0
  assert manifest.tokenizer.mask_id == LETTERS.index("[MASK]")
  assert not any(name.startswith("masked_lm") for name in rows[0])
  assert ("is_continuation" in rows[0]) == whole_words
  for row in rows if whole_words else ():
    want = [int(LETTERS[i].startswith("##")) for i in row["input_ids"]]
    assert row["is_continuation"] == want


@pytest.mark.parametrize("cross", [False, True])
def test_sequences_for_masked_lm_alone(settings_for, cross):
  settings = settings_for(
    objective="mlm", cross_documents=cross, dynamic_masks=True,
    examples_per_record=1 if cross else 4,
  )  # fmt: skip
  assert settings.short_seq_prob == 0.0
  # New masks need no copies.
  defaults = (
    settings_for(dupe_factor=None),
    settings_for(dupe_factor=None, dynamic_masks=True),
  )
  assert [made.dupe_factor for made in defaults] == [10, 1]
  summary = creation.create(settings)
  rows, counts = all_examples(summary), summary.manifest.counts
  assert summary.manifest.objective == "mlm" and counts["random_next"] == 0
  assert not any(any(row["next_sentence_labels"]) for row in rows)
  sep, cls = LETTERS.index("[SEP]"), LETTERS.index("[CLS]")
  text = 0
  for row in rows:
    ids, segments = np.array(row["input_ids"]), np.array(row["segment_ids"])
    ends = np.flatnonzero(ids == sep)
    assert np.count_nonzero(ids == cls) == max(row["input_mask"])
    text += np.count_nonzero(ids) - len(ends) - max(row["input_mask"])
    if cross:
      turns = np.flatnonzero(np.diff(segments))
      assert set(turns) <= set(ends) and segments[1] == 0
      # [SEP] of any document is not to predict.
      mask = np.array([row["input_mask"]])
      maskable = masking.maskable_tokens(ids[None], mask, segments[None])[0]
      assert not maskable[ends].any() and not maskable[0]
    else:
      assert not segments.any()
  assert text == counts["tokens"] * settings.dupe_factor
  real = sum(np.count_nonzero(row["input_mask"]) for row in rows)
  assert real / (len(rows) * SEQ) > 0.9


def test_a_vocabulary_of_symbols(tmp_path, make_of):
  tokens = [*SPECIAL_TOKENS, *"MKTAYIQRL"]
  (tmp_path / "symbols.txt").write_text("\n".join(tokens) + "\n")
  flags = dict(do_lower_case=False, dynamic_masks=True)
  flags["vocab_file"] = f"{tmp_path}/symbols.txt"
  summary = make_of("M K T A Y I\nQ R L M K T\n\n" * 20, **flags)
  seen = {i for row in all_examples(summary) for i in row["input_ids"]}
  assert seen == {tokens.index(t) for t in tokens} - {1, 4}
  drawn = summary.manifest.mask_settings()
  assert (drawn.mask_id, drawn.vocab_size) == (4, 14)


def test_a_shard_of_several_blocks(make, monkeypatch):
  made = {}
  for size in (1 << 24, 1 << 13):
    monkeypatch.setattr(creation, "_BLOCK_BYTES", size)
    summary = make(num_shards=2, examples_per_record=3)
    rows = all_examples(summary)
    made[size] = sorted(e[:2] + e[3:] for r in rows for e in unpacked(r))
    assert summary.manifest.counts["examples"] == len(made[size])
  shards_of_blocks = make(examples_per_record=3).manifest.settings["num_shards"]
  assert shards_of_blocks > 4  # so they were blocks
  # Which random segment follows does not depend on blocks either.
  assert made[1 << 24] == made[1 << 13]


def test_a_document_longer_than_a_block_is_cut(tmp_path, letters, monkeypatch):
  monkeypatch.setattr(token_store, "_SCAN_DOCUMENTS", 2)
  lines = ["a b c"] * 10 + ["d " * 40] + ["e f"] * 21
  shorter = ["g h"] * 16, ["i"] * 3, ["j"] * 32
  (tmp_path / "t.txt").write_text(
    "\n\n".join("\n".join(d) for d in (shorter[0], lines, *shorter[1:]))
  )
  paths = [f"{tmp_path}/t.txt"]
  counts = store_of(tmp_path, paths, letters, block_tokens=32)
  assert (counts.documents, counts.cut_documents) == (4, 1)
  assert counts.parts == len(stored_documents(str(tmp_path)))
  first, *parts, third, fourth = stored_documents(str(tmp_path))
  assert [len(d) for d in (first, third, fourth)] == [16, 3, 32]
  sentences = [s for part in parts for s in part]
  assert [len(s) for s in sentences] == [3] * 10 + [40] + [2] * 21
  # Each ends with the sentence that reaches another 4 tokens.
  want = [6, 3, 3, 6, 3, 3, 6, 40, 2] + [4] * 10
  assert [sum(map(len, p)) for p in parts] == want


def test_next_sentence_label_tells_the_document(make_of):
  # Every document repeats its own letter, so tokens tell the document.
  documents = [f"{c} {c} {c}\n" * 30 for c in "abcdefghijklmnop"]
  summary = make_of("\n".join(documents), masked_lm_prob=0.01)
  first = LETTERS.index("a")
  for e in all_examples(summary):
    n = sum(e["input_mask"])
    segments = {0: set(), 1: set()}
    masked = e["masked_lm_positions"][:1]
    for i in range(n):
      if e["input_ids"][i] >= first and i not in masked:
        segments[e["segment_ids"][i]].add(e["input_ids"][i])
    if all(segments.values()):
      same = segments[0] == segments[1]
      assert same == (e["next_sentence_labels"] == [0])


def test_pairs_that_teach_no_next_sentence_have_a_note(make_of):
  note = "few documents have a next sentence to learn"
  assert note in record_report.next_sentences(91, 100)
  assert note not in record_report.next_sentences(90, 100)
  # A single document suffices for masked LM alone.
  summary = make_of("a b c d\n" * 30, objective="mlm")
  counts = summary.manifest.counts
  assert counts["documents"] == 1 and counts["tokens"] == 120
  report = create_pretraining_data.report(summary)
  assert "random next      none: masked LM alone" in report


def test_manifest_counts(tmp_path, make_of, letters):
  summary = make_of("a a b ?\na\n\nb a . ?\n")
  c = summary.manifest.counts
  assert c["tokens"] == 9 and c["unknown_tokens"] == 2
  assert (c["documents"], c["sentences"]) == (2, 3)
  want = -sum(p * math.log(p) for p in (4 / 9, 2 / 9, 2 / 9, 1 / 9))
  assert c["unigram_entropy"] == pytest.approx(want, rel=1e-12)
  manifest = summary.manifest
  found = listing(f"{tmp_path}/out/train.tfrecord")
  assert found == (f"{tmp_path}/out/train.manifest.json", manifest)
  assert manifest.tokenizer.sha256 == file_sha256(letters)
  assert manifest.settings["dupe_factor"] == 3
  assert (manifest.max_seq_length, manifest.masking) == (SEQ, "static")
  for info in manifest.files:
    path = f"{tmp_path}/out/{info.name}"
    assert file_sha256(path) == info.sha256
  assert "unknown tokens   22.222%" in create_pretraining_data.report(summary)


def long_words(letters, *lengths):
  rng = np.random.default_rng(0)
  return ["".join(rng.choice([*letters], length)) for length in lengths]


THAI = "กขคงจฉชซญดตถทธนบปผฝพฟภมยรลวสหอฮาเแ"
SHARES = {
  # A word of more than 200 letters is google/bert's [UNK], one token.
  "thai": (long_words(THAI, *[1] * 10, *[700] * 8), 5600 / 5610),
  "mostly thai": (long_words(THAI, *[20] * 12, *[300] * 36), 10800 / 11040),
  "DNA": (long_words("acgt", *[200] * 10, *[201] * 5), 1005 / 3005),
  # Lower-casing drops marks, and takes syllables of Hangul apart.
  "marks": (["กุกุ กุ", "ก้"] * 8, 1 / 2),
  "hangul": (["한국어 말", "사과"] * 8, 0),
  "long hangul": (["한국어 말", "사" * 120] * 8, 120 / 124),
  "a bad decoding": (["caf\ufffd\ufffd", "a\x01"] * 8, 3 / 7),
}


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("lines, share", SHARES.values(), ids=SHARES)
def test_letters_that_no_token_spells_are_counted(
  tmp_path, make_of, lines, share, whole_words
):
  letters = sorted(set(unicodedata.normalize("NFD", "".join(lines))))
  pieces = [f"##{letter}" for letter in letters]
  vocab = tmp_path / "vocab.txt"
  vocab.write_text("\n".join([*SPECIAL_TOKENS, *letters, *pieces]))
  summary = make_of(
    "\n".join([*lines[::2], "", *lines[1::2]]),
    vocab_file=str(vocab),
    do_whole_word_mask=whole_words,
  )
  counts = summary.manifest.counts
  total = len("".join(lines).replace(" ", ""))
  assert counts["letters"] == total
  assert counts["unknown_letters"] == round(share * total)
  report = create_pretraining_data.report(summary)
  assert f"unknown letters  {share:.3%}, in unknown" in report


def test_every_copy_of_a_document_is_in_one_block_and_they_are_spread(make_of):
  for num_blocks in (1, 4, 7):
    where = {}
    for block in range(num_blocks):
      for copy in range(3):
        for d in shards.documents_of_block(50, block, num_blocks, copy, 5):
          assert (int(d), copy) not in where
          where[int(d), copy] = block
    assert len(where) == 150
    for d in range(50):
      assert len({where[d, c] for c in range(3)}) == min(3, num_blocks)
  # Each is masked in its own way.
  text = "\n\n".join(["a b c d e f g h i j k l m n o p q"] * 2)
  examples = all_examples(make_of(text, dupe_factor=20))
  assert len(examples) == 40
  assert len({tuple(e["masked_lm_positions"]) for e in examples}) > 30


PAIR = b"a b c\n\nd e\n"  # the least text


def test_a_data_set_removes_its_own_files_only(tmp_path, make_of):
  out = tmp_path / "out"
  # A list keeps its names.
  make_of(PAIR, output_file=f"{out}/first.x,{out}/second.x")
  names = "first.manifest.json first.x first.x.index second.x second.x.index"
  assert sorted(os.listdir(out)) == names.split()
  names = ["train.tfrecord", "train2.tfrecord", "train-a.x", "train[1].x"]
  names += ["train*", "trai", "store.x", "lock", "train.tfrecord-0.x"]
  for name in names:
    before = contents(out) if out.exists() else {}
    make_of(PAIR, output_file=f"{out}/{name}", num_shards=2)
    assert contents(out).items() > before.items()
  # Another number of shards replaces its own.
  before = contents(out)
  make_of(PAIR, output_file=f"{out}/train[1].x", num_shards=1)
  after = contents(out)
  changed = {name for name in before if before[name] != after.get(name)}
  assert changed and all(name.startswith("train[1]") for name in changed)
  assert not (out / "train[1]-00000-of-00002.x").exists()


@pytest.mark.parametrize(
  "name, shards, words",
  [
    ("train.y", None, "out/train.manifest.json is train-00000-of-00003.x's"),
    ("b.x,train-00002-of-00003.x", None, "a file of the data set .*/train.man"),
    ("mine.x", None, "mine.manifest.json.*move it away, or give"),
    ("folder", 1, "out/folder is a folder: give another name"),
    ("../t.txt", None, "is of --input_file, and would be written"),
    ("in.txt", 2, "in-00000-of-00002.txt is of --input_file, and"),
    ("vocab.txt", 2, "vocab-00001-of-00002.txt is of --vocab_file, and"),
  ],
)
def test_files_of_others_stay(
  tmp_path, make_of, letters, name, shards, words, monkeypatch
):
  out = tmp_path / "out"
  text = "a\n\nb\n\nc\n"
  make_of(text, output_file=f"{out}/train.x", num_shards=3)
  (out / "mine.manifest.json").write_text('{"name": "mine"}')
  (out / "in-00000-of-00002.txt").write_text("a\n\nb\n")
  vocabulary = shutil.copy(letters, out / "vocab-00001-of-00002.txt")
  before = contents(out)
  (out / "folder").mkdir()
  monkeypatch.setattr(text_files, "split_into_pieces", None)
  names = ",".join(f"{out}/{part}" for part in name.split(","))
  with pytest.raises(errors.UserError, match=words):
    create(
      tmp_path, f"{tmp_path}/t.txt,{out}/in-*", vocabulary, output_file=names,
      num_shards=shards,
    )  # fmt: skip
  (out / "folder").rmdir()
  assert contents(out) == before


def test_a_file_that_another_took_meanwhile_stays(make, monkeypatch):
  first = data_set.find_manifests

  def and_others_come(paths):
    others = dict.fromkeys(paths, ("other.manifest.json", None))
    return others if "-of-" in paths[0] else first(paths)

  monkeypatch.setattr(data_set, "find_manifests", and_others_come)
  monkeypatch.setattr(creation, "_BLOCK_BYTES", 1 << 14)
  monkeypatch.setattr(shards, "build_shard", None)
  with pytest.raises(errors.UserError, match="of the data set other.manifest"):
    make()


def test_default_shards_depend_on_the_corpus_only(settings_for):
  settings = settings_for(max_seq_length=128)

  def shards_of(documents, tokens, parts):
    counts = token_store.CorpusCounts(
      documents, 0, parts, tokens // 20, tokens, 0, 4, 0, 5 * tokens, 6.0
    )
    return creation.shards_and_blocks(counts, settings)[0]

  assert shards_of(2, 100, 2) == 1
  assert shards_of(10**4, 10**6, 10**4) == 3
  assert shards_of(10**7, 10**10, 10**7) == 4096
  # One document, of which parts are made.
  assert shards_of(1, 10**8, 500) > 8 and shards_of(1, 10**8, 3) == 3


def test_sentencepiece(make, spm_model):
  summary = make(
    vocab_file=None, spm_model_file=spm_model, do_whole_word_mask=True
  )
  assert summary.manifest.counts["unknown_letters"] == 0
  assert summary.manifest.tokenizer.kind == "sentencepiece"
  assert summary.manifest.counts["examples"] == len(all_examples(summary)) > 60


def test_sentencepiece_keeps_words_with_unknown_characters(spm_model):
  """Their marks may be pieces before what is unknown."""
  encoder = kinds.KINDS["sentencepiece"](spm_model, True)
  (words,) = encoder.encode_words(["ab\u0e01cd \u0e01 ef"])
  pieces = [encoder.tokens[number] for number in words.ids]
  begins = [
    p for p, c in zip(pieces, words.is_continuation, strict=True) if not c
  ]
  assert "[UNK]" in pieces or "<unk>" in pieces
  assert len(begins) == 3 and all(p.startswith("\u2581") for p in begins)


def test_long_sentences_are_noted_where_they_matter(tmp_path, make):
  """Masked LM alone is cut by tokens."""
  (tmp_path / "long.txt").write_text("\n\n".join(["a b " * 100] * 9))
  for objective in data_set.OBJECTIVES:
    summary = make(input_file=str(tmp_path / "long.txt"), objective=objective)
    noted = "give --prose=en" in create_pretraining_data.report(summary)
    assert noted == (objective != "mlm")


# Failures ---------------------------------------------------------------------


# Without the time: two test processes must name this case alike.
CUT = gzip.compress(PAIR, mtime=0)[:-6]


@pytest.mark.parametrize(
  "name, content, changes, words",
  [
    ("t.txt", b"", {}, r"t\.txt: the file is empty"),
    ("t.txt", b"\n \n\n", {}, "no sentence"),
    ("t.txt", b"a b\nc d\n", {}, "one document of 2 sentences.*blank line"),
    ("t.txt.gz", CUT, {}, "not a whole gzip file"),
    ("t.txt", PAIR, {"num_shards": 9}, "num_shards=9 is too many"),
    ("t.txt", PAIR, {"vocab_file": None}, "name one vocabulary"),
    ("v.txt", b"[UNK]", {"vocab_file": "v.txt"}, r"lacks \[PAD\], \[CLS\]"),
  ],
)
def test_failures_leave_nothing_but_earlier_records(
  tmp_path, make_of, letters, name, content, changes, words, monkeypatch
):
  make_of(PAIR)
  before = contents(tmp_path / "out")
  monkeypatch.chdir(tmp_path)
  (tmp_path / name).write_bytes(content)
  values = {"input_file": name, "vocab_file": letters, **changes}
  with pytest.raises(errors.UserError, match=words):
    create(tmp_path, **values)
  assert contents(tmp_path / "out") == before


def test_one_document_is_refused_again_by_a_resumed_start(
  tmp_path, letters, monkeypatch
):
  """Its tokens are whole, so the second start does not count them."""
  (tmp_path / "t.txt").write_text("a b\nc d\n")
  stop_after(monkeypatch, token_store, "read_counts", 0)
  for _ in range(2):
    with pytest.raises(Stopped):
      create(tmp_path, input_file=f"{tmp_path}/t.txt", vocab_file=letters)
  monkeypatch.undo()
  with pytest.raises(errors.DataError, match="one document of 2 sentences"):
    create(tmp_path, input_file=f"{tmp_path}/t.txt", vocab_file=letters)


def test_text_of_another_encoding(tmp_path, make_of, make):
  text = "a b c\n\nd e f\n\né\n"
  want, made = make_of(text), contents(tmp_path / "out")
  assert want.manifest.settings["encoding"] == "utf-8"
  (tmp_path / "u.txt").write_bytes(text.encode("utf-16"))
  got = make(input_file=f"{tmp_path}/u.txt", encoding="utf-16")
  assert got.manifest.settings["encoding"] == "utf-16"
  assert got.manifest.counts == want.manifest.counts
  del made["train.manifest.json"]
  assert contents(tmp_path / "out").items() > made.items()


def deletes_work_of_another_tokenizer(settings, capfd):
  """Whether a start, which is stopped, says so."""
  capfd.readouterr()
  with pytest.MonkeyPatch.context() as patch:
    stop_after(patch, creation._Creation, "publish", 0)
    with pytest.raises(Stopped):
      creation.create(settings)
  return "(tokenizer): deleted it" in capfd.readouterr().err


def test_unfinished_work_is_of_all_files_of_a_tokenizer(
  tmp_path, texts, bpe_file, capfd
):
  """Also of those beside it, which say what becomes of a text."""
  path = tmp_path / "tokenizer" / "tokenizer.json"
  path.parent.mkdir()
  shutil.copy(bpe_file, path)
  settings = settings_of(
    tmp_path, input_file=texts, tokenizer_file=str(path), vocab_file=None
  )
  for prefix, is_other in ((True, False), (True, False), (False, True)):
    config = {"add_prefix_space": prefix}
    (path.parent / "tokenizer_config.json").write_text(json.dumps(config))
    assert deletes_work_of_another_tokenizer(settings, capfd) == is_other


def test_unfinished_work_is_of_the_merges_of_a_vocabulary(
  tmp_path, texts, capfd
):
  folder = tmp_path / "tokenizer"
  tokenizer_folders.write(folder, "roberta, vocab.json alone")
  settings = settings_of(
    tmp_path,
    input_file=texts,
    tokenizer_file=f"{folder}/vocab.json",
    vocab_file=None,
  )
  merges = folder / "merges.txt"
  lines = merges.read_text().splitlines()
  for kept, is_other in ((lines, False), (lines, False), (lines[:-1], True)):
    merges.write_text("\n".join(kept))
    assert deletes_work_of_another_tokenizer(settings, capfd) == is_other


def test_a_vocabulary_that_changes_meanwhile(tmp_path, letters):
  path = tmp_path / "v.txt"
  shutil.copy(letters, path)
  spec = info_of(path)
  token_store.load_tokenizer(spec)
  token_store.load_tokenizer.cache_clear()
  path.write_text(path.read_text() + "more\n")
  with pytest.raises(errors.UserError, match="v.txt was changed while records"):
    token_store.load_tokenizer(spec)


@pytest.mark.parametrize(
  "place, name",
  [(creation._Creation, "_join"), (creation.tokenizer_files, "load")],
)
def test_text_that_changes_while_it_is_read(
  tmp_path, make_of, monkeypatch, place, name
):
  original = getattr(place, name)

  def and_then_grow(*arguments):
    result = original(*arguments)
    with open(tmp_path / "t.txt", "a") as f:
      f.write("c\n")
    return result

  monkeypatch.setattr(place, name, and_then_grow)
  with pytest.raises(data_set.DataError, match="t.txt was changed while"):
    make_of("a\n\nb\n" * 9)
  assert os.listdir(tmp_path / "out") == []


def test_an_error_does_not_wait_for_other_workers(tmp_path):
  """Nor does a signal: their files appear whole or not at all."""
  began = time.monotonic()
  with pytest.raises(ZeroDivisionError), Pool(2) as pool:
    pool.start(time.sleep, [60, 60, 60])
    while not multiprocessing.active_children():
      time.sleep(0.01)
    raise ZeroDivisionError
  assert time.monotonic() - began < 30
  assert not multiprocessing.active_children()


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"max_predictions_per_seq": 99}, "seq=99: must be 1 to max_seq_length"),
    ({"examples_per_record": 33}, "examples_per_record=33: must be 1 to"),
    ({"prose": "True"}, "--prose=True: must be an ISO 639-1 code"),
    ({"output_file": ","}, "different files of one folder"),
    ({"output_file": "x,y,x"}, "different files of one folder"),
    ({"output_file": "a.index"}, "a name without the end"),
    ({"output_file": "a,b", "num_shards": 3}, "left out or 2"),
    ({"cross_documents": True}, "without --objective=mlm"),
  ],
)
def test_impossible_settings(tmp_path, changes, words):
  with pytest.raises(UserError, match=words):
    settings_of(tmp_path, "x", "v", **changes)
