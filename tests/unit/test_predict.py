"""Predictions: text to arrays and back, by models whose answer is known."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import types

import conversions
import numpy as np
import pytest
import runs
import trained
from samples import LETTERS, TINY, change_manifest, write_records_of

import predict
from checkpoints import run_folder
from common.errors import DataError, UserError
from interop import inference, model_source
from interop.heads import BEHAVIOURS
from interop.predictions import Input, Predictor
from records import data_set

MASK, CLS, SEP = (LETTERS.index(t) for t in ("[MASK]", "[CLS]", "[SEP]"))
FOLLOWS = LETTERS.index("c")
BEHAVIOUR_OF = {
  "pretraining": "encoder", "squad": "span", "ner": "token_classifier",
}  # fmt: skip


class KnownModel:
  """Stands for `inference.Model`: functions of the arrays, by signature."""

  def __init__(self, **functions):
    self.functions, self.calls = functions, []

  def names(self):
    return list(self.functions)

  def run(self, name, arrays):
    self.calls.append((name, arrays))
    return self.functions[name](arrays)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, letters):
  """kind -> folder of a checkpoint that says what is known.

  The masked word is c with nearly all probability, the next sentence is one
  with 1/4.
  """
  folder = tmp_path_factory.mktemp("models")
  words = np.zeros(TINY["vocab_size"])
  words[FOLLOWS] = 50
  changes = {
    "pretraining": {
      "cls/predictions/output_bias": words,
      "cls/seq_relationship/output_weights": 0.0,
      "cls/seq_relationship/output_bias": [0, math.log(3)],
    },
  }  # fmt: skip
  for kind in trained.TASKS:
    values = changes.get(kind, {})
    trained.write_model(folder / kind, kind, letters, values)
  return {kind: str(folder / kind) for kind in trained.TASKS}


def predictor(folder, **settings):
  source = model_source.find(folder)
  return Predictor(inference.open_model(source), source, **settings)


def known(folder, **functions):
  """A `Predictor` with the folder's task and vocabulary and a known model."""
  model = KnownModel(**functions)
  return model, lambda **settings: Predictor(
    model, model_source.find(folder), **settings
  )


def answers(made, inputs):
  """What a `Predictor` answers, as JSON has it."""
  return [prediction.answer for prediction in made.predict(inputs)]


@pytest.fixture(scope="module")
def both(folders):
  """kind -> predictors of the model: from the checkpoint, from its export."""

  def open_both(kind):
    source = model_source.find(folders[kind])
    model = inference.open_checkpoint(source)
    export = folders[kind] + ".export"
    inference.export(model, source, export)
    return Predictor(model, source), predictor(export)

  return {kind: open_both(kind) for kind in ("pretraining", "ner")}


@pytest.fixture(scope="module")
def pretrained(both):
  return both["pretraining"][0]


INPUTS = [
  Input("a [MASK] b[MASK]"),
  Input("a b", "c d e"),
  Input("ab cd"),
  Input("[MASK]", "b"),
]


WORDS = [Input("ab cd " * 20), Input("x", words=["ab", "c"])]


@pytest.mark.parametrize(
  "kind, inputs", [("pretraining", INPUTS), ("ner", WORDS)]
)
def test_an_export_predicts_what_its_checkpoint_does(both, kind, inputs):
  ours, exported = (each.predict(inputs) for each in both[kind])
  assert json.dumps(ours) == json.dumps(exported)
  if kind == "ner":
    assert len(ours[1].answer["tags"]) == 2


def test_words_for_masks(pretrained):
  first, second, third, fourth = answers(pretrained, INPUTS)
  assert [len(one.get("masks", ())) for one in (first, fourth)] == [2, 1]
  for mask in first["masks"] + fourth["masks"]:
    assert [len(mask), mask[0]["word"]] == [5, "c"]
    assert mask[0]["probability"] > 0.99
    shares = [word["probability"] for word in mask]
    assert shares == sorted(shares, reverse=True)
  assert second["is_next"] == pytest.approx(0.25)
  assert "masks" not in second and len(third["embedding"]) == 32


def test_another_spelling_of_the_mask_is_text_and_told(folders, capsys):
  word = lambda arrays: {"sequence_output": np.ones([1, 9, 2])}
  _, make = known(folders["pretraining"], encoder=word, masked_lm=word)
  for text in ("a [mask] .", "a <mask> .", "a [Mask] ."):
    assert "embedding" in answers(make(), [Input(text)])[0]
    said = capsys.readouterr().err
    assert f"{text!r}: {text[2:-2]} is read as text" in said
    assert "write [MASK]\n" in said
  make().predict([Input("a mask .")])
  make(embedding="mean").predict([Input("a [mask] .")])
  assert not capsys.readouterr().err


def test_wrong_inputs_are_refused_before_the_model_is_read():
  for given, texts, words in (
    ({"question": "who?"}, [], "both --question and --context"),
    ({"question": "who?"}, ["a text"], "one of these"),
    ({}, ["a text", __file__], f"is a file: give --input={__file__}"),
    ({"input": "no/where"}, [], "--input=no/where: there is no such file"),
  ):
    with pytest.raises(UserError, match=words):
      predict.main(predict.PredictSettings(**given), "no model", *texts)


def test_a_mask_is_its_token_where_it_stands(folders):
  """Of several texts, in batches with padding; no word beyond the words."""
  size = TINY["vocab_size"]  # the model's; the vocabulary is smaller

  def by_place(arrays):
    shape = (*arrays["masked_lm_positions"].shape, size)
    log_probs = np.full(shape, -9.0, np.float32)
    log_probs[..., len(LETTERS) :] = 0  # of no word
    for row, places in enumerate(arrays["masked_lm_positions"]):
      for number, place in enumerate(places):
        log_probs[row, number, 5 + place] = -0.5
    return {"log_probs": log_probs}

  model, make = known(folders["pretraining"], masked_lm=by_place)
  texts = ["x[MASK]y", "[MASK] a [MASK]"] * 20
  found = answers(make(top_k=1), [Input(text) for text in texts])
  best = [[mask[0]["word"] for mask in one["masks"]] for one in found]
  assert best == [[LETTERS[5 + 2]], [LETTERS[5 + 1], LETTERS[5 + 3]]] * 20
  ids = model.calls[0][1]["input_ids"]
  x, y = LETTERS.index("x"), LETTERS.index("y")
  assert ids[0].tolist() == [CLS, x, MASK, y, SEP]
  assert [len(arrays["input_ids"]) for _, arrays in model.calls] == [16, 16, 8]


def test_embeddings_are_of_tokens_and_not_of_padding(folders):
  def encoder(arrays):
    ids = arrays["input_ids"].astype(np.float32)
    vectors = np.where(arrays["input_mask"] == 1, ids, 1e9)[..., None]
    return {"sequence_output": vectors}

  _, make = known(folders["pretraining"], encoder=encoder)
  inputs = [Input("a"), Input("a b c d e")]
  (short, _) = answers(make(), inputs)
  a = LETTERS.index("a")
  assert short["embedding"] == [pytest.approx((CLS + a + SEP) / 3)]
  (short, _) = answers(make(embedding="cls"), inputs)
  assert short["embedding"] == [CLS]


def span_of(start, end, null):
  """Scores: 5 for the letters of an answer, `null` for [CLS], else -5."""

  def run(arrays):
    ids = arrays["input_ids"]
    scores = {}
    for name, letter in (("start_logits", start), ("end_logits", end)):
      scores[name] = np.where(ids == LETTERS.index(letter), 5.0, -5.0)
      scores[name][:, 0] = null
    return scores

  return run


def test_answers_in_long_paragraphs(folders):
  """The answer is in the last of several windows of 24 tokens."""
  context = " ".join("abcdefg" * 6) + " X Y, Z ."
  question = Input("x y", context)
  _, make = known(folders["squad"], span=span_of("y", "z", -1.0))
  # A comma is unknown to the vocabulary, and part of the text all the same.
  (found,) = answers(make(top_k=2), [question])
  assert found["answer"] == "Y, Z" and len(found["answers"]) == 2
  assert found["windows"] > 3
  assert found["answers"][0]["probability"] > 0.9
  # "No answer" is a candidate, and chosen where it scores higher.
  _, make = known(folders["squad"], span=span_of("y", "z", 9.0))
  (found,) = answers(make(), [question])
  assert found["answer"] == "" and found["answers"][0]["text"] == ""


def test_answers_keep_marks_that_no_token_has(folders):
  _, make = known(folders["squad"], span=span_of("y", "z", -1.0))
  for context in ("x y\u0301 z\u0301, a", "x y z\u200d\ufe0f\u00ad"):
    (found,) = answers(make(), [Input("who", context)])
    assert found["answer"] == context[2:].split(",")[0]
  # Texts of no tokens: the question, the paragraph, and both.
  for text in ("\u0301", "\u200b\u0301 \ufeff"):
    inputs = [Input(text, "y z"), Input("y", text), Input(text, text)]
    found = answers(make(), inputs)
    assert [answer["answer"] for answer in found] == ["y z", "", ""]


def labels_of_letters(**rows):
  """Probabilities by the letter that a token is: its row 0.8, others 0.1."""

  def run(arrays):
    ids = arrays["input_ids"]
    shares = np.full([*ids.shape, 3], 0.1)
    shares[..., 2] = 0.8  # O
    for letter, row in rows.items():
      shares[ids == LETTERS.index(letter)] = np.eye(3)[row] * 0.7 + 0.1
    return {"probabilities": shares}

  return run


@pytest.fixture
def tagger(folders):
  """B-LOC begins with p, I-LOC with q."""
  _, make = known(folders["ner"], token_classifier=labels_of_letters(p=0, q=1))
  return make


def test_entities_are_where_they_stand_in_the_text(tagger):
  text = " In Pa\u0301ris,q\u00adx - (p)  \u200b qu e\u4e2dq."
  (found,) = answers(tagger(), [Input(text)])
  assert found["text"] == text
  spans = [(one["start"], one["end"]) for one in found["entities"]]
  texts = [one["text"] for one in found["entities"]]
  assert texts == ["Pa\u0301ris", "q\u00adx", "p", "qu", "q"]
  assert [text[begin:end] for begin, end in spans] == texts
  assert {one["label"] for one in found["entities"]} == {"LOC"}
  assert found["entities"][0]["score"] == pytest.approx(0.8)
  # Words of an entity are joined.
  (found,) = answers(tagger(), [Input("at Pa Qb  qc, p")])
  assert [one["text"] for one in found["entities"]] == ["Pa Qb  qc", "p"]


def test_given_words_have_a_tag_each(tagger):
  """Also words of a tokenizer's several or none, in any number of windows."""
  given = ["p.q", "\u200b", "q", *"abcdefgh" * 9, "pp"]
  inputs = [Input("x", words=given), Input(" ".join(given[2:]))]
  tokens, text = answers(tagger(), inputs)
  assert tokens["tokens"] == given
  assert tokens["tags"] == ["B-LOC", "O", "I-LOC", *"O" * 72, "B-LOC"]
  assert [one["start"] for one in text["entities"]] == [0, 146]


def test_texts_of_one_call_have_the_labels_that_each_has_alone(tagger):
  given = Input("a", words=["p", "a", "q"])
  inputs = [*map(Input, ("Pa x", "x Qb p", "\u200b", "at Pa Qb")), given]
  together = answers(tagger(), inputs)
  assert together == [answers(tagger(), [one])[0] for one in inputs]
  assert [len(one["entities"]) for one in together[:-1]] == [1, 2, 0, 1]


def test_plain_labels_are_of_words(folders):
  model = KnownModel(token_classifier=labels_of_letters(p=0, q=1))
  source = model_source.find(folders["ner"])
  task = {**source.task, "labels": ["NOUN", "VERB", "O"]}
  source = dataclasses.replace(source, task=task)
  (found,) = answers(Predictor(model, source), [Input("p qs.")])
  assert found == {"tokens": ["p", "qs", "."], "tags": ["NOUN", "VERB", "O"]}
  assert [name for name, _ in model.calls] == ["token_classifier"]


def test_the_screen_of_each_head(folders, tagger):
  """The lines that people read; JSON has the numbers."""
  word = [math.log(0.75), math.log(0.25), *[-99.0] * (len(LETTERS) - 2)]
  known_outputs = {
    "encoder": {"sequence_output": [[[0.5] * 8] * 4]},
    "next_sentence": {"log_probs": [[math.log(0.25), math.log(0.75)]]},
    "masked_lm": {"log_probs": [[word]]},
    "classifier": {"probabilities": np.array([[1 / 6, 3 / 6, 2 / 6]])},
    "regression": {"logits": [[2.5]]},
  }
  vector = "8 numbers, all tokens' mean: 0.500 0.500 0.500 0.500 0.500 0.500"
  screens = {
    "encoder": ["a b", f"  {vector} ... (--json: all)"],
    "next_sentence": ["a b ||| c", "  follows: 25.0%"],
    "masked_lm": ["a [MASK]", f"  [MASK]  {LETTERS[0]} 75.0%"],
    "classifier": ["a b", "  yes 50.0%  who knows 33.3%  no 16.7%"],
    "regression": ["a b", "  2.5000"],
  }
  for name, screen in screens.items():
    kind = "pretraining"
    signature = name
    if name in ("classifier", "regression"):
      kind = signature = "classifier"
    outputs = {k: np.array(v) for k, v in known_outputs[name].items()}
    _, make = known(folders[kind], **{signature: lambda _: outputs})  # noqa: B023
    made = make(top_k=1)
    assert made.predict([made.parse(screen[0])])[0].lines == screen
  made = tagger()
  lines = [
    made.predict([made.parse(line)])[0].lines
    for line in ("in Pq ,p", "a b", '{"tokens": ["a", "p"]}')
  ]
  assert lines == [
    ["in Pq ,p", "   80.0%  LOC  Pq", "   80.0%  LOC  p"],
    ["a b", "  (no entity)"],
    ["a/O  p/B-LOC"],
  ]
  for null, best in ((-1.0, "y z"), (9.0, "(no answer)")):
    _, make = known(folders["squad"], span=span_of("y", "z", null))
    made = make(top_k=1)
    (_, (question, answer, candidate)) = made.predict(
      [made.parse("who ||| x y z .")]
    )[0]
    assert (question, answer) == ("who", f"  answer: {best}")
    assert candidate == f"  100.0%  {best}"


def test_inputs_that_the_head_does_not_take(folders, tagger):
  _, make = known(folders["squad"], span=None)
  message = "--max_seq_length=9 leaves .*--max_query_length=6 tokens"
  with pytest.raises(UserError, match=message):
    make(max_seq_length=9)
  make(max_seq_length=9, embedding="cls")
  with pytest.raises(UserError, match="--question and --context"):
    make(max_seq_length=10).predict([Input("who")])
  _, make = known(folders["classifier"], classifier=None)
  with pytest.raises(UserError, match="reads single texts"):
    make().predict([Input("a", "b")])
  with pytest.raises(UserError, match="'a': this model reads single"):
    tagger().predict([Input("a", "b")])


@pytest.mark.parametrize("kind", ["squad", "classifier"])
def test_any_model_gives_embeddings_of_plain_texts(folders, kind):
  """Whatever it reads else."""
  model = predictor(folders[kind], embedding="cls")
  (one,) = answers(model, [model.parse('{"text')])
  assert len(one["embedding"]) == 32 and one["pooling"] == "cls"


def test_a_pair_without_a_head_for_it_is_embedded(folders):
  """Of a model that was trained on masked LM alone."""
  source = model_source.find(folders["pretraining"])
  model = inference.open_checkpoint(source, ["encoder", "masked_lm"])
  (one,) = answers(Predictor(model, source), [Input("a b", "c")])
  assert len(one["embedding"]) == 32


def test_what_is_too_long_is_cut_and_told(pretrained, folders):
  long = " ".join("ab" * 40)  # 80 tokens; the model has 64 places
  ((answer, lines),) = pretrained.predict([Input(long)])
  assert answer["tokens_cut"] == 18
  assert "18 tokens were not read" in lines[-1]
  with pytest.raises(UserError, match=r"\[MASK\] is beyond the 64 tokens"):
    pretrained.predict([Input(long + " [MASK]")])
  source = model_source.find(folders["pretraining"])
  with pytest.raises(UserError, match="--max_seq_length=65: must be 4 to"):
    Predictor(KnownModel(), source, max_seq_length=65)


def test_lines():
  for line, reads, wanted in (
    ("a b\n", "span", Input("a b")),
    ("a b\tc\n", "span", Input("a b", "c")),
    ("a ||| b c", "span", Input("a", "b c")),
    ('{"question": "q", "context": "c|||d"}', "span", Input("q", "c|||d")),
    # A brace is text where no question is meant.
    ('{"question": "q"}', "classifier", Input('{"question": "q"}')),
    ("{[MASK]", "encoder", Input("{[MASK]")),
    # A line of words is one text, whatever is in it.
    ("a ||| b\tc d\n", "token_classifier", Input("a ||| b\tc d")),
    ('{"text": " a b "}', "token_classifier", Input(" a b ")),
    ('{"tokens": ["a", "b c"]}', "token_classifier",
     Input("a b c", words=["a", "b c"])),
  ):  # fmt: skip
    assert BEHAVIOURS[reads].parse(line) == wanted
  for line, message in (
    ("", "one text or two, none of them empty"),
    ("a ||| b ||| c", "one text or two"),
    ('{"question": "q"}', "question and context: context is missing"),
    ('{"question": " ", "context": "c"}', "none of them empty"),
    ('{"a":' * 100_000, "not JSON .*nested too deeply"),
  ):
    with pytest.raises(DataError, match=message):
      BEHAVIOURS["span"].parse(line)


def test_errors_of_lines_name_file_and_line(tmp_path):
  lines = tmp_path / "lines.txt"
  settings = predict.PredictSettings(input=str(lines))
  question, text = (BEHAVIOURS[name].parse for name in ("span", "encoder"))
  asked = '{"question": "q", "context": "c"}'
  lines.write_text(f'{asked}\n\n{{"question\n')
  read = predict.read_inputs(settings, [], question)
  assert next(read) == Input("q", "c")
  with pytest.raises(DataError, match=r"lines\.txt: line 3: .* is not JSON"):
    next(read)
  texts = [Input(asked), Input('{"question')]
  assert list(predict.read_inputs(settings, [], text)) == texts
  typed = predict.read_inputs(settings, ["a ||| b", "{"], question)
  with pytest.raises(DataError, match=r"^text 2: .* is not JSON"):
    list(typed)
  # Characters that are no UTF-8 would be lost; a byte order mark is none.
  lines.write_bytes(b"\xef\xbb\xbfone\nun caf\xe9\n")
  read = predict.read_inputs(settings, [], text)
  assert next(read) == Input("one")
  with pytest.raises(DataError, match=r"lines\.txt: line 2: not UTF-8 \(0xe9"):
    next(read)


# What a model is -------------------------------------------------------------


def test_models_that_are_none(tmp_path, folders, letters):
  def refused(name, words, **given):
    with pytest.raises(UserError, match=words):
      model_source.find(str(name), model_source.Given(**given)).tokenizer()

  (tmp_path / "lines.txt").touch()
  for name in ("no/such", "", tmp_path / "lines.txt"):
    refused(name, f"^{name}: no such model. Name a run")
  refused(tmp_path, "no model: name the --output_dir")
  copy = shutil.copytree(folders["pretraining"], tmp_path / "copy")
  (tmp_path / "empty").mkdir()
  shutil.copytree(copy, tmp_path / "up" / "runs" / "deep")
  refused(tmp_path, r"model: did you mean \S+/copy\?")
  refused(tmp_path / "up", r"model: did you mean \S+/deep\?")
  shutil.copytree(copy, tmp_path / "other")
  refused(tmp_path, r"mean \S+/copy or \S+/other\?")
  large = tmp_path / "large.txt"
  large.write_text("\n".join([*LETTERS, *(f"x{i}" for i in range(30))]))
  given = {"vocab_file": str(large)}
  refused(copy, r"large.txt is another vocabulary than", **given)
  os.remove(copy / "vocab.txt")
  refused(copy, r"has 108 tokens, but .* vocab_size=100", **given)
  refused(copy, "give --vocab_file")
  refused(copy, "give only one of --vocab", vocab_file="a", spm_model_file="b")
  os.remove(copy / "bert_config.json")
  refused(copy, "give --bert_config_file")


def test_case_and_vocabulary_of_flags_and_folders(
  tmp_path, folders, letters, spm_model
):
  """Flags add what nothing says; they contradict nothing in silence."""

  def case(name, **given):
    source = model_source.find(str(name), model_source.Given(**given))
    return source.task["do_lower_case"], len(source.lines()) > 1

  folder = tmp_path / "bare"
  shutil.copytree(folders["pretraining"], folder)
  assert case(folder) == (True, True)
  for lower in (True, False):
    assert case(folder, do_lower_case=lower) == (lower, False)
  shutil.copytree(folder, tmp_path / "cased_L-12_H-768_A-12")
  published = str(tmp_path / "cased_L-12_H-768_A-12" / "bert_model.ckpt")
  assert case(published) == (False, False)
  (ids,) = model_source.find(published).tokenizer().encode_batch(["A"])
  assert ids.tolist() == [LETTERS.index("[UNK]")]
  with pytest.raises(UserError, match="=True, but .* on cased text"):
    case(published, do_lower_case=True)
  run = folders["classifier"]
  assert case(run, do_lower_case=True) == (True, False)
  with pytest.raises(UserError, match=r"on lower-cased text \(.*task.json\)"):
    case(run, do_lower_case=False)
  # It may be beside the vocabulary, which need not be beside the checkpoint.
  words = tmp_path / "words"
  words.mkdir()
  vocabulary = str(shutil.copy(letters, words / "vocab.txt"))
  said = words / "tokenizer_config.json"
  said.write_text('{"do_lower_case": false}')
  assert case(folder, vocab_file=vocabulary) == (False, False)
  shutil.copyfile(spm_model, folder / "spiece.model")
  with pytest.raises(UserError, match="only one is the model's: give --vocab"):
    model_source.find(str(folder))
  given = {"vocab_file": letters}
  found = model_source.find(str(folder), model_source.Given(**given))
  assert found.vocabulary == given
  os.remove(folder / "vocab.txt")
  found = model_source.find(str(folder))
  assert found.vocabulary == {"spm_model_file": f"{folder}/spiece.model"}


@pytest.fixture
def theirs(folders, tmp_path):
  """The pre-trained model as a Hugging Face folder."""
  conversions.convert(folders["pretraining"], tmp_path / "theirs")
  return tmp_path / "theirs"


def test_a_hugging_face_folder_is_read_in_place(folders, theirs, tmp_path):
  inputs, files = [Input("a [MASK] b")], os.listdir(theirs)
  source = model_source.find(str(theirs))
  assert (source.path, source.chosen) == (str(theirs), "a Hugging Face folder")
  want = json.dumps(predictor(folders["pretraining"]).predict(inputs))
  assert json.dumps(predictor(str(theirs)).predict(inputs)) == want
  os.remove(theirs / "vocab.txt")  # tokenizer.json has it, too
  assert json.dumps(predictor(str(theirs)).predict(inputs)) == want
  other = tmp_path / "v.txt"
  other.write_text("a\n")
  with pytest.raises(UserError, match="is another vocabulary than"):
    model_source.find(str(theirs), model_source.Given(vocab_file=str(other)))
  config = runs.read_json(theirs, "config.json")
  config["hidden_dropout_prob"] = 0.5
  (theirs / "config.json").write_text(json.dumps(config))
  assert model_source.find(str(theirs)).bert.hidden_dropout_prob == 0.5
  assert {*os.listdir(theirs), "vocab.txt"} == {*files}  # nothing is written


def test_a_hugging_face_folder_with_another_tokenizer(theirs, letters):
  """It is read, with a vocab.txt beside it or not; another cannot be given."""
  file = theirs / "tokenizer.json"
  content = json.loads(file.read_text())
  content["pre_tokenizer"] = {"type": "WhitespaceSplit"}
  file.write_text(json.dumps(content))
  given = model_source.Given(vocab_file=letters)
  message = "another vocabulary than .*tokenizer.js"
  for _ in range(2):
    source = model_source.find(str(theirs))
    assert source.vocabulary == {"tokenizer_file": str(file)}
    (ids,) = source.tokenizer().encode_batch(["a. b"])
    assert source.tokenizer().unk_id in ids  # "a." is one word
    with pytest.raises(UserError, match=message):
      model_source.find(str(theirs), given)
    (theirs / "vocab.txt").unlink(missing_ok=True)


def test_a_damaged_export(folders, both, tmp_path):
  copy = shutil.copytree(folders["pretraining"] + ".export", tmp_path / "copy")
  pb = copy / "saved_model.pb"
  pb.write_bytes(pb.read_bytes()[:1000])
  with pytest.raises(UserError, match="not a whole SavedModel"):
    inference.open_export(str(copy))


def test_a_run_finds_its_vocabulary_by_its_records(
  tmp_path, folders, letters, monkeypatch
):
  """Over run.json and the manifest, by its hash; from any folder."""
  data, run = tmp_path / "data", tmp_path / "runs" / "a"
  records = write_records_of(data, letters, do_lower_case=False)
  records["files"] = ["data/data-0.tfrecord"]  # as named from tmp_path
  path, words = data / "data.manifest.json", data / "vocab.txt"
  tokenizer = data_set.Manifest.load(str(path)).tokenizer
  shutil.copytree(folders["pretraining"], run)
  own = run / "vocab.txt"
  own.unlink(), words.unlink()
  (run / "run.json").write_text(json.dumps({"runs": [{"data": records}]}))

  def source(**given):
    return model_source.find(str(run), model_source.Given(**given))

  missing = f"{tokenizer.sha256}, which is not near"
  with pytest.raises(UserError, match=missing):
    source()
  near = shutil.copyfile(letters, tmp_path / "vocab.txt")
  for place in (tmp_path, data, "/"):
    monkeypatch.chdir(place)
    assert source().vocabulary == {"vocab_file": str(near)}
    assert source().task["max_seq_length"] == 32
    assert source().task["do_lower_case"] is False
  other = tmp_path / "other.txt"
  other.write_text("".join(f"{t}\n" for t in LETTERS[:-1]))
  with pytest.raises(DataError, match="but the records were made with"):
    source(vocab_file=str(other))
  # With a copy of its own the records are not asked.
  own.write_bytes(near.read_bytes())
  change_manifest(data, tokenizer={"sha256": "0" * 64, "do_lower_case": True})
  assert source().vocabulary == {"vocab_file": str(own)}
  assert source().task["do_lower_case"] is False
  own.unlink()
  with pytest.raises(UserError, match="run.json: the records were made with"):
    source()


def test_a_run_keeps_its_vocabulary(tmp_path, letters):
  """That of its records, or of the model that it continues from."""
  data, run, start = (tmp_path / name for name in ("data", "run", "start"))
  write_records_of(data, letters, do_lower_case=False)
  path, words = data / "data.manifest.json", data / "vocab.txt"
  manifest, own = data_set.Manifest.load(str(path)), run / "vocab.txt"
  config = types.SimpleNamespace(output_dir=str(run), init_checkpoint=None)
  run.mkdir(), start.mkdir()
  content = words.read_bytes()
  for beside, before in (
    (content, None),
    (b"another file by now", content),
    (content, b"of a start that saved nothing"),
  ):
    words.write_bytes(beside)
    if before:
      own.write_bytes(before)
    run_folder.keep_vocabulary(config, {"": (path, manifest)})
    assert own.read_bytes() == content
  own.unlink()
  words.rename(start / "vocab.txt")
  config.init_checkpoint = str(start / "model.ckpt-1")
  run_folder.keep_vocabulary(config, {"": (path, manifest)})
  assert own.read_bytes() == content


def test_a_model_trained_without_segments_gets_none(folders):
  source = model_source.find(folders["pretraining"])
  tokenizer = dataclasses.asdict(source.tokenizer().info())
  path = pathlib.Path(folders["pretraining"], "run.json")
  log_probs = np.zeros([1, 1, TINY["vocab_size"]])
  model, make = known(
    folders["pretraining"], masked_lm=lambda arrays: {"log_probs": log_probs}
  )

  def segments():
    make().predict([Input("a [MASK]", "b")])
    return model.calls.pop()[1]["segment_ids"]

  assert segments().any()
  try:
    for flags, records in (
      ({"objective": "mlm"}, tokenizer),
      ({"objective": "mlm_nsp", "segment_ids": False}, tokenizer),
      ({"objective": "mlm_nsp", "segment_ids": False}, None),  # no manifest
    ):
      data = {"files": [], "tokenizer": records}
      run = {"flags": flags, "plan": {"updates": 1}, "data": data}
      path.write_text(json.dumps({"runs": [run]}))
      assert not segments().any()
  finally:
    path.unlink()


def test_the_command_ends_with_its_reader(folders, both, tmp_path):
  """As of `| head`; "-" is standard input, the answers are JSON lines."""
  lines = tmp_path / "lines.txt"
  lines.write_text("a [MASK]\n\na\tb\n" + "a [MASK]\n" * 9999)
  command = [f"{runs.ROOT}/predict.py", folders["pretraining"] + ".export"]
  with open(lines) as stdin:
    process = subprocess.Popen(
      [sys.executable, *command, "-", "--json", "--top_k=1"],
      stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      env={**os.environ, "PYTHONPATH": runs.ROOT},
    )  # fmt: skip
  first, second = (json.loads(process.stdout.readline()) for _ in range(2))
  assert [len(first["masks"][0]), first["masks"][0][0]["word"]] == [1, "c"]
  assert second["is_next"] == pytest.approx(0.25)
  process.stdout.close()
  said = process.stderr.read()
  assert process.wait() == -signal.SIGPIPE and b"Broken" not in said


@pytest.mark.parametrize(
  "kind, wrong, message",
  [
    ("pretraining", float("nan"), "text 2 is nan: give"),  # a cell of pandas
    ("pretraining", " ", "text 2 is ' ': give"),
    ("pretraining", ("a", "b", "c"), "text 2 is .*: give"),
    ("pretraining", ["a", "b"], "'a b': .* reads single texts and pairs"),
    ("squad", "a", "'a': this model reads pairs of texts .*--question"),
    ("ner", ("a", "b"), "'a': .* reads single texts and lists of words"),
    ("ner", [], r"text 2 is \[\]: give .* not empty"),
  ],
)
def test_code_is_answered_or_told_which_text_is_wrong(
  folders, kind, wrong, message
):
  _, make = known(folders[kind], **{BEHAVIOUR_OF[kind]: None})
  with pytest.raises(DataError, match=message):
    make().answers([("a", "b") if kind == "squad" else "a", wrong])
