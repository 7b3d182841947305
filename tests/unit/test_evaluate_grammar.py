"""Minimal pairs: how they are read, scored one by one, and counted."""

import itertools
import json
import math
import os
import pathlib

import numpy as np
import pytest
import runs
import trained
from samples import encode_example, fake_records

from common.errors import DataError, UserError
from gradients.distributed import Comm
from interop import inference, minimal_pairs, model_source, pseudo_likelihood
from interop.minimal_pairs import Pair
from records import tfrecord, unigrams
from text_encoders import kinds
from tools import evaluate_grammar

# Words of one to five pieces: "cat" is c, ##a, ##t.
TEXTS = ["a b c", "the cat sat .", "cats", "a", "b a c", "the dog sat .", "it"]
TEXTS += [f"{word} is {word}s and a . b" for word in ("ab", "cde", "fghij")]


def write_pairs(path, pairs):
  """A file of (good, bad) sentences; its name."""
  lines = [
    json.dumps({"sentence_good": good, "sentence_bad": bad})
    for good, bad in pairs
  ]
  path.write_text("\n".join(lines))
  return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, letters):
  """A small model of random weights with a pooler, a run folder's files."""
  folder = tmp_path_factory.mktemp("models") / "small"
  trained.write_model(folder, "pretraining", letters)
  return str(folder)


@pytest.fixture(scope="module")
def opened(folder):
  """The model with its masked LM head alone, and its encoder."""
  source = model_source.find(folder)
  return inference.open_checkpoint(source, ["masked_lm"]), source.tokenizer()


def one_by_one(model, encoder, ids, within_word):
  """A sentence's score by single runs of predict.py's model, in plain loops."""
  ids = [encoder.cls_id, *ids.tolist(), encoder.sep_id]
  total = 0.0
  for place in range(1, len(ids) - 1):
    masked = list(ids)
    masked[place] = encoder.mask_id
    later = place + 1
    while within_word and encoder.tokens[ids[later]].startswith("##"):
      masked[later] = encoder.mask_id
      later += 1
    arrays = {
      "input_ids": [masked], "input_mask": [[1] * len(ids)],
      "segment_ids": [[0] * len(ids)], "masked_lm_positions": [[place]],
    }  # fmt: skip
    found = model.run("masked_lm", arrays)
    total += float(found["log_probs"][0, 0, ids[place]])
  return total


def copies_of(encoder, text, *within_word):
  """The tokens of a sentence with [CLS] and [SEP], and its masked copies."""
  (ids,) = encoder.encode_batch([text])
  row = np.array([encoder.cls_id, *ids, encoder.sep_id], np.int32)
  copies = pseudo_likelihood.masked_copies(row[None], encoder, *within_word)[0]
  assert copies.dtype == np.int32
  assert ((copies == row) | (copies == encoder.mask_id)).all()
  return row, copies


def hidden(encoder, text, *within_word):
  """The places that each copy masks."""
  _, copies = copies_of(encoder, text, *within_word)
  return [np.flatnonzero(c == encoder.mask_id).tolist() for c in copies]


def test_a_full_stop_is_no_piece_of_the_word_before_it(spm_model):
  """SentencePiece marks words by the space before them, and it has none."""
  encoder = kinds.load_tokenizer(spm_model_file=spm_model)
  alone = pseudo_likelihood.words_alone(encoder)
  of = {token: alone[i] for i, token in enumerate(encoder.tokens) if token}
  words = [
    token for token in of if token[0] == "\u2581" and token[1:].isalpha()
  ]
  assert of["."] and of[","] and words and not any(map(of.get, words))
  assert not of[encoder.mark]  # of the piece after it
  row, copies = copies_of(encoder, "cat.")
  assert (copies[:-1, -2] == row[-2]).all()  # seen with every piece


def test_what_is_masked(opened, bpe_file):
  """A token and the later pieces of its word, or the token alone."""
  _, encoder = opened
  assert hidden(encoder, "abc d", True) == [[1, 2, 3], [2, 3], [3], [4]]
  assert hidden(encoder, "abc d", False) == [[1], [2], [3], [4]]
  assert not pseudo_likelihood.words_alone(encoder).any()  # ## says all
  encoder = kinds.load_tokenizer(tokenizer_file=bpe_file)
  # "the"; the space, c, u, b in a word; and the sign.
  places = [[1], [2, 3, 4, 5], [3, 4, 5], [4, 5], [5], [6]]
  assert hidden(encoder, "the cub.") == places


def test_an_unknown_piece_is_in_its_word(spm_model):
  encoder = kinds.load_tokenizer(spm_model_file=spm_model)
  row, copies = copies_of(encoder, "ca\u4dffts cat")
  unknown = row.tolist().index(encoder.unk_id)
  assert 1 < unknown < len(row) - 2
  # Where the first piece is scored, the pieces after it are hidden, too.
  assert (copies[0, 1 : unknown + 2] == encoder.mask_id).all()
  assert encoder.mask_id not in copies[unknown + 1 :, 1 : unknown + 1]


@pytest.mark.parametrize("within_word", [True, False])
def test_scores_are_those_of_single_runs(
  folder, opened, within_word, monkeypatch
):
  """In batches of any size, also where one sentence is several runs."""
  model, encoder = opened
  sentences = encoder.encode_batch(TEXTS)
  reference = inference.open_model(model_source.find(folder))
  want = [one_by_one(reference, encoder, s, within_word) for s in sentences]
  scorer = pseudo_likelihood.Scorer(model, encoder, within_word)
  for tokens in (4096, 60, 7):
    monkeypatch.setattr(pseudo_likelihood, "_TOKENS", tokens)
    got = scorer.score(sentences, Comm())
    np.testing.assert_allclose(got, want, rtol=1e-5)
  assert len(set(np.round(want, 3))) == len(TEXTS)
  reference.close()


def test_an_export_scores_as_its_checkpoint(folder, opened, tmp_path):
  source = model_source.find(folder)
  model, encoder = opened
  sentences = encoder.encode_batch(TEXTS)
  path = str(tmp_path / "export")
  inference.export(inference.open_checkpoint(source), source, path)
  both = [
    pseudo_likelihood.Scorer(m, encoder).score(sentences, Comm())
    for m in (model, inference.open_export(path))
  ]
  np.testing.assert_allclose(*both, rtol=1e-5)
  pairs = write_pairs(tmp_path / "p.jsonl", [("a", "b")])
  with pytest.raises(UserError, match="is exported with its own"):
    evaluate(path, pairs=pairs, precision="bf16")


def test_batches_hold_whole_sentences_of_one_length():
  lengths = np.random.default_rng(0).integers(1, 40, 5000)
  made = pseudo_likelihood.batches(lengths)
  assert sorted(np.concatenate(made).tolist()) == list(range(5000))
  assert all(len(set(lengths[batch])) == 1 for batch in made)
  sizes = [lengths[b].sum() * (lengths[b[0]] + 2) for b in made]
  assert max(sizes) <= 4096 and np.mean(sizes) > 3000


# Pairs ------------------------------------------------------------------------

GOOD = {
  "sentence_good": "the cat sits .", "sentence_bad": "the cat sit .",
  "UID": "agreement_1", "field": "syntax/semantics",
  "linguistics_term": "agreement",
}  # fmt: skip


def test_pairs_of_a_file(tmp_path):
  more = {"sentence_good": " a b ", "sentence_bad": "b a", "pairID": "7"}
  lines = [json.dumps(GOOD), "", json.dumps(more)]
  path = tmp_path / "a.jsonl"
  path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
  assert minimal_pairs.read(str(path)) == [
    Pair(
      "the cat sits .", "the cat sit .", f"{path}: line 1",
      "agreement_1", "syntax_semantics", "agreement",
    ),
    Pair("a b", "b a", f"{path}: line 3", f"{tmp_path}/a"),
  ]  # fmt: skip


@pytest.mark.parametrize(
  "data, message",
  [
    (b"{}\n{}", "line 1: .*: sentence_good is missing"),
    (b"\n{", "line 2 is no JSON object"),
    (b"\n[]", "line 2 is no JSON object"),
    (json.dumps({**GOOD, "UID": 3}).encode(), "line 1: .*UID is 3, not text"),
    (b"caf\xe9", "line 1: not UTF-8"),
    (b"\n \n", "no rows"),
  ],
)
def test_pairs_that_are_none(tmp_path, data, message):
  path = tmp_path / "a.jsonl"
  path.write_bytes(data)
  with pytest.raises(DataError, match=f"a.jsonl: {message}"):
    minimal_pairs.read(str(path))


def test_files_of_one_name_are_not_one_paradigm(tmp_path):
  for name in ("en", "de"):
    (tmp_path / name).mkdir()
    write_pairs(tmp_path / name / "order.jsonl", [("a b", "b a")])
  pairs = minimal_pairs.read(str(tmp_path / "*" / "order.jsonl"))
  assert len(minimal_pairs.by_paradigm(pairs)) == 2


def test_a_sample_is_the_same_in_any_order_of_the_pairs(tmp_path):
  pairs = [(f"g{i}", f"b{i}") for i in range(50)]
  write_pairs(tmp_path / "p.jsonl", pairs)
  write_pairs(tmp_path / "few.jsonl", [("g", "b")])
  pattern = f"{tmp_path}/*.jsonl"
  some = minimal_pairs.read(pattern, 8)
  counts = map(len, minimal_pairs.by_paradigm(some).values())
  assert len(some) == 9 and [*counts] == [1, 8]
  numbers = [int(pair.bad[1:]) for pair in some[1:]]
  assert numbers == sorted(numbers) != list(range(8))
  write_pairs(tmp_path / "p.jsonl", pairs[::-1])
  again = minimal_pairs.read(pattern, 8)
  assert {pair.good for pair in again} == {pair.good for pair in some}


def test_sentences_that_do_not_fit(opened):
  _, encoder = opened
  pair = lambda good: [Pair(good, "a", "f.jsonl: line 5", "f")]
  for text, count in (("a " * 9, 9), ("\u200b", 0)):
    message = rf"f.jsonl: line 5: .* has {count} tokens, .* 1 to 8"
    with pytest.raises(DataError, match=message):
      evaluate_grammar.encode(pair(text), encoder, 10)
  pairs = [*pair("A b"), *pair("a B"), *pair("a b c d e f g h")]
  sentences, numbers = evaluate_grammar.encode(pairs, encoder, 10)
  assert numbers.tolist() == [[0, 1], [0, 1], [2, 1]]
  assert list(map(len, sentences)) == [2, 1, 8]


# Results ----------------------------------------------------------------------


def test_accuracies_and_ties():
  """Means of paradigms, not of pairs; a tie is wrong."""
  kinds = ["pft"] * 4 + ["qfu", "ret"]
  pairs = [Pair("g", "b", "", *kind) for kind in kinds]
  scores = np.array([[2, 1], [1, 2], [1, 1], [0, 5], [2, 1], [2, 1.0]])
  baseline = np.tile([1.0, 1.0], [6, 1])
  found = minimal_pairs.results(pairs, scores, baseline)
  assert found["accuracy"] == pytest.approx(2.25 / 3)
  assert found["accuracy_of_pairs"] == 0.5
  assert (found["ties"], found["pairs"]) == (1, 6)
  assert found["fields"]["f"]["accuracy"] == 0.625
  assert found["linguistics_terms"]["t"]["accuracy"] == 0.625
  assert found["unigram"]["accuracy"] == 0 and found["unigram"]["ties"] == 6
  variance = (3 / 8 * 5 / 8 / 8 + 2 * (3 / 5 * 2 / 5 / 5)) / 9
  width = 1.96 * math.sqrt(variance)
  assert found["interval_95"] == pytest.approx([0.75 - width, 0.75 + width])
  assert minimal_pairs.interval([(3, 3)])[1] == 1
  lines = minimal_pairs.table(found)
  assert [line.split()[0] for line in lines[1:6]] == ["e", "r", "f", "p", "q"]
  assert lines[4].split() == ["p", "25.0%", "1", "4", "0.0%", "4"]
  assert lines[6].startswith("mean of 3 paradigms") and "75.0%" in lines[6]
  assert "50.0%" in lines[7]
  assert minimal_pairs.table(minimal_pairs.results(pairs, scores, None))


def test_tokens_are_counted_as_they_were_before_masking(tmp_path):
  """In files of stages, which differ in lengths, examples and masks."""
  paths, want = [], np.zeros(100, int)
  for seed, sizes in enumerate([(32, 5, 100), (128, 20, 100, 3), (16, 2, 100)]):
    paths.append(str(tmp_path / str(seed)))
    with tfrecord.shard_writer(paths[-1]) as writer:
      for features in fake_records(7, seed, *sizes):
        ids = features["input_ids"].copy()
        used = features["masked_lm_weights"] > 0
        places = features["masked_lm_positions"][used]
        ids[places] = features["masked_lm_ids"][used]
        want += np.bincount(ids[features["input_mask"] > 0], minlength=100)
        if seed:  # masks are drawn on reading
          features["input_ids"] = ids
          for name in ("positions", "ids", "weights"):
            del features[f"masked_lm_{name}"]
        writer.write(encode_example(features))
  want[[0, 7]] = 0
  for some in (paths, paths[::-1]):
    files = tfrecord.RecordSet(some)
    features = unigrams.features_of(files, 100)
    texts = unigrams.texts(files, unigrams.numbers(files), features)
    assert unigrams.count(texts, 100, [0, 7]).tolist() == want.tolist()
  with tfrecord.shard_writer(damaged := str(tmp_path / "damaged")) as writer:
    writer.write(b"\xff")
  files = tfrecord.RecordSet([*paths, damaged])
  with pytest.raises(DataError, match="damaged: record 0 .*not a tf.train.Exa"):
    unigrams.features_of(files, 100)


def test_the_records_to_count():
  """Existing ones, once each; about as many as asked for, from all parts."""
  for count, most, in_a_row in itertools.product(
    (1, 99, 100, 101, 250, 10_000), (15, 100, 200), (1, 10, 100)
  ):
    found = unigrams.numbers(range(count), most, in_a_row)
    assert found[0] == 0 and (np.diff(found) > 0).all()
    assert found[-1] == count - 1 or most < 2 * in_a_row
    assert found[-1] < count
    assert min(count, most) // 2 <= len(found) <= min(count, most)


def test_unigram_likelihoods():
  """Smoothed, and equal to the last bit for any order of the same tokens."""
  counts = np.array([0, 6, 1])
  rng = np.random.default_rng(0)
  sentence = rng.integers(0, 3, 50)
  again = [rng.permutation(sentence) for _ in range(20)]
  found = unigrams.log_likelihoods(counts, [np.array([0, 1]), *again, sentence])
  assert found[0] == pytest.approx(math.log(1 / 10) + math.log(7 / 10))
  assert len(set(found[1:])) == 1


# The command ------------------------------------------------------------------


def evaluate(folder, **given):
  evaluate_grammar.evaluate(
    evaluate_grammar.Settings(**given), str(folder), Comm()
  )


@pytest.fixture
def pairs_file(tmp_path):
  both = itertools.product(TEXTS[:4], TEXTS[4:6])
  pairs = [(f"{b} is {a}", f"{a} is {b}") for a, b in both]
  return write_pairs(tmp_path / "order.jsonl", [*pairs, ("Same", "same")])


def test_a_run_folder_with_its_records(
  tiny_run, tmp_path, letters, pairs_file, capsys, monkeypatch
):
  """The results are in it; the baseline is of the records that it names."""
  run = tmp_path / "run"
  runs.trained(tiny_run, run)
  # Single letters, which the records have unlike numbers of.
  files = tfrecord.RecordSet(sorted(map(str, tmp_path.glob("data-*.tfrecord"))))
  texts = unigrams.texts(files, range(120), unigrams.features_of(files, 100))
  tokens = pathlib.Path(letters).read_text().split()
  counts = unigrams.count(texts, 100, [])
  known = {t: counts[n] for n, t in enumerate(tokens) if t.isalnum()}
  frequent, rare = max(known, key=known.get), min(known, key=known.get)
  assert known[frequent] > known[rare]
  write_pairs(tmp_path / "down.jsonl", [(rare, frequent)])
  write_pairs(tmp_path / "up.jsonl", [(frequent, rare)])
  given = {"parts": model_source.Given(vocab_file=letters)}
  given["pairs"] = f"{tmp_path}/*.jsonl"
  evaluate(run, **given)
  found = runs.read_json(run, "grammar_results.json")
  assert found["pairs"] == 11
  down, order, up = found["paradigms"].values()
  assert (order["pairs"], order["ties"]) == (9, 1)
  assert order["unigram"]["ties"] == 9  # the same words
  assert [p["unigram"]["accuracy"] for p in (down, up)] == [0.0, 1.0]
  said = capsys.readouterr()
  assert "unigram baseline: " in said.err and "of the 120 records" in said.err
  assert "11 pairs of 3 paradigms: 19 different sentences\n" in said.err
  assert "mean of 3 paradigms" in said.out and "unigram" in said.out
  # Without the records; where it may not be written it is shown only.
  for path in tmp_path.glob("data-*"):
    path.unlink()
  evaluate(run, **given)
  capsys.readouterr()
  assert "unigram" not in runs.read_json(run, "grammar_results.json")
  (run / "grammar_results.json").unlink()
  monkeypatch.setattr(os, "access", lambda path, mode: path != str(run))
  evaluate(run, **given)
  said = capsys.readouterr()
  assert "not as it read them: give --unig" in said.err
  assert "mean of 3 paradigms" in said.out and "unigram" not in said.out
  assert not (run / "grammar_results.json").exists()


def test_a_folder_of_no_run(
  folder, packed_run, pairs_file, tmp_path, letters, capsys
):
  evaluate(folder, pairs=pairs_file)
  said = capsys.readouterr()
  assert "does not say on which records" in said.err and ".json" not in said.out
  output = tmp_path / "new" / "folder.json"
  evaluate(folder, pairs=pairs_file, output=str(output))
  assert runs.read_json(output.parent, output.name)["pairs"] == 9
  trained.write_model(tmp_path / "classifier", "classifier", letters)
  with pytest.raises(UserError, match="has no masked_lm head, only encoder"):
    evaluate(tmp_path / "classifier", pairs=pairs_file)
  (_, pattern), _ = packed_run
  with pytest.raises(UserError, match="records are of another vocabulary"):
    evaluate(folder, pairs=pairs_file, unigram_records=pattern)
