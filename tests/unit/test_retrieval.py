"""BEIR's folders, the exact search, its measures, and BM25."""

import json
from unittest import mock

import numpy as np
import pytest

from common.errors import DataError, UserError
from finetuning.embedding import Pair, collection_of, measured_search
from retrieval import beir, bm25, measures, nearest, texts

HEADER = "query-id\tcorpus-id\tscore\n"
DOCUMENTS = [
  {"_id": "d1", "title": "Ada", "text": "wrote the first program"},
  {"_id": "d2", "title": "", "text": "the river floods its valley"},
  {"_id": 3, "text": "rivers of snow"},
]
QUERIES = [
  {"_id": "q1", "text": "programs of Ada"},
  {"_id": "q2", "text": "flooding rivers"},
  {"_id": "unjudged", "text": ""},
]


def write(folder, documents=DOCUMENTS, queries=QUERIES, qrels=None):
  """A folder of BEIR's form, with lines of which a string is written as is."""
  if qrels is None:
    qrels = HEADER + "q1\td1\t1\nq2\td2\t2\nq2\t3\t1\n"
  (folder / "qrels").mkdir(exist_ok=True)
  (folder / "qrels" / "test.tsv").write_text(qrels)
  for name, values in (("corpus", documents), ("queries", queries)):
    lines = [v if isinstance(v, str) else json.dumps(v) for v in values]
    (folder / f"{name}.jsonl").write_text("\n".join(lines))
  return str(folder)


def test_a_folder_is_read(tmp_path):
  assert beir.read(write(tmp_path)) == (
    {"q1": "programs of Ada", "q2": "flooding rivers"},
    {
      "d1": "Ada wrote the first program",
      "d2": "the river floods its valley",
      "3": "rivers of snow",
    },
    {"q1": {"d1": 1}, "q2": {"d2": 2, "3": 1}},
  )
  assert texts.is_beir(tmp_path) and not texts.is_beir(tmp_path / "qrels")


@pytest.mark.parametrize(
  "parts, message",
  [
    ({"qrels": "q1\td1\t1\n" * 2}, "line 2 has no 'query-id'.*by a header"),
    ({"qrels": HEADER}, "test.tsv: no rows"),
    ({"qrels": HEADER + "q9\td1\t1"}, "line 2: 'q9' is not in queries.jsonl"),
    ({"qrels": HEADER + "\nq1\td9\t1"}, "line 3: 'd9' is not in corpus.json"),
    ({"qrels": HEADER + "q1\td1\t-1"}, "line 2: the score -1 is no whole"),
    ({"qrels": HEADER + "q1\td1\t0.5"}, "line 2: the score 0.5 is no whole"),
    ({"qrels": HEADER + "q1\td1\tnan"}, "line 2: score is 'nan', not a fin"),
    ({"qrels": HEADER + "q1 d1 1"}, "line 2 has 1 fields for 3 columns"),
    (
      {"qrels": HEADER + "q1\td1\t1\nq1\td1\t2"},
      "line 3: 'd1' has another sco",
    ),
    ({"qrels": HEADER + "unjudged\td1\t1"}, "line 2: the query 'unjudged' has"),
    ({"documents": [*DOCUMENTS, DOCUMENTS[1]]}, "two lines have the _id 'd2'"),
    ({"queries": [QUERIES[0]] * 2}, "queries.jsonl: two lines have the _id 'q"),
    ({"documents": ['{"_id": "d1"}']}, "corpus.jsonl: line 1:.*text is missi"),
    ({"documents": ["", "{"]}, "corpus.jsonl: line 2: no JSON object with"),
  ],
)
def test_bad_folders_are_a_line(tmp_path, parts, message):
  with pytest.raises(DataError, match=message):
    beir.read(write(tmp_path, **parts))


def test_titles_are_of_folders_alone(tmp_path):
  """Not of any file whose columns are named as theirs."""
  corpus = [DOCUMENTS[0], {"_id": "d5", "title": 1984, "text": "a novel"}]
  folder = write(tmp_path, corpus)
  names = {"text_field": "text", "id_field": "_id"}
  of_folder = dict(texts.find(folder, **names).read())
  of_file = dict(texts.find(f"{folder}/corpus.jsonl", **names).read())
  assert of_folder["d1"] == "Ada wrote the first program"
  assert of_file["d1"] == "wrote the first program"
  assert of_folder["d5"] == "1984 a novel"
  queries = texts.find(folder, **names, name=texts.QUERIES_FILE)
  assert [*dict(queries.read())] == ["q1", "q2", "unjudged"]


def test_texts_keep_their_indentation(tmp_path):
  """Of any form: byte-level tokenizers read it."""
  code = "def f():\n    return 1\n"
  corpus = [{"_id": "d1", "title": "", "text": code}]
  folder = write(tmp_path, corpus)
  names = {"text_field": "text", "id_field": "_id"}
  for files in (folder, f"{folder}/corpus.jsonl"):
    assert dict(texts.find(files, **names).read()) == {"d1": code.strip()}


def test_another_split_is_named(tmp_path):
  with pytest.raises(DataError, match="dev.tsv: no such file: name a"):
    beir.read(write(tmp_path), "dev")


@pytest.mark.parametrize("cosine", [True, False])
def test_the_nearest_are_those_of_a_sort_for_any_block(cosine):
  random = np.random.default_rng(0)
  queries = random.normal(size=[70, 33]).astype(np.float32)
  # Each vector several times: ties, of which the lower number is first.
  documents = random.normal(size=[150, 33])[random.integers(0, 150, 700)]
  documents = documents.astype(np.float16)
  exact = [documents.astype(np.float32), queries]
  if cosine:
    exact = [nearest.unit(vectors) for vectors in exact]
  similar = exact[1].astype(np.float64) @ exact[0].astype(np.float64).T
  similar = similar.round(9)  # ties, which BLAS may compute in two ways
  order = np.lexsort([np.tile(np.arange(700), [70, 1]), -similar])[:, :20]
  for block in (10_000, 64, 37):
    scores, numbers = nearest.top_k(queries, documents, 20, cosine, block)
    np.testing.assert_array_equal(numbers, order)
    expected = np.take_along_axis(similar, order, axis=1)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert scores.dtype == np.float32
    if block == 10_000:
      whole = scores
    np.testing.assert_array_equal(scores, whole)  # to the last bit
  # Fewer documents than asked for, and a vector of zeros.
  scores, numbers = nearest.top_k(queries[:1] * 0, documents[:3], 9, cosine)
  assert (numbers == [[0, 1, 2]]).all() and not scores.any()
  documents[5, 1] = np.nan
  with pytest.raises(DataError, match="vector of document 5, counted from 0"):
    nearest.top_k(queries, documents, 3, cosine, 4)


QRELS = {
  "a": {"x": 2, "y": 1, "z": 0, "u": 1},
  "b": {"x": 1},
  "c": {"y": 3, "b": 1},
  "d": {"z": 1},
  "e": {"z": 0},
}
RUN = {
  "a": {"w": 0.5, "y": 0.5, "x": 0.5, "z": 0.1, "a": 9},
  "b": {"v": 0.9, "w": 0.9, "x": 0.15},
  "c": {"y": 0.1, "u": 0.1 + 1e-9, "v": 0.1},
}
RUN["b"] |= {f"n{number:02}": 0.15 for number in range(20)}


@pytest.mark.parametrize(
  "queries, expected",
  [
    # pytrec_eval 0.5.11: ndcg_cut_10, recip_rank of the first 10, recall_100.
    # In "a" and "c" ties decide, as float32 has them.
    ("a", (0.7224242270408039, 1, 2 / 3)),
    ("b", (0.5, 1 / 3, 1)),
    ("c", (0.8262346571285599, 1, 0.5)),
    ("d", (0, 0, 0)),
    ("e", (0, 0, 0)),
    ("ab", (0.6112121135204019, 2 / 3, 5 / 6)),
    ("ad", (0.36121211352040195, 0.5, 1 / 3)),
  ],
)
def test_measures_are_trec_evals(queries, expected):
  documents = dict.fromkeys("abuvwxyz", "") | dict.fromkeys(RUN["b"], "")
  scores = [
    [RUN.get(q, {}).get(d, -np.inf) for d in documents] for q in queries
  ]
  results = measures.evaluate(
    beir.Collection(dict.fromkeys(queries, ""), documents, QRELS),
    np.array(scores), np.tile(np.arange(len(documents)), [len(queries), 1]),
  )  # fmt: skip
  assert [*results] == ["ndcg@10", "mrr@10", "recall@100"]
  np.testing.assert_allclose([*results.values()], expected, atol=1e-12)


@pytest.mark.parametrize(
  "judged, found",
  [({"1": 1}, True), ({"2": 1}, False), ({"1": 0, "2": 1}, False)],
)
def test_a_judged_answer_may_have_its_querys_name(judged, found):
  """Both counted from 1; another such document is the query itself."""
  collection = beir.Collection({"1": ""}, {"1": "", "2": ""}, {"1": judged})
  results = measures.evaluate(
    collection, np.array([[0.9, -np.inf]]), np.array([[0, 1]])
  )
  assert results["mrr@10"] == found


def test_a_file_with_a_query_is_no_folder(monkeypatch):
  """A server may ignore a query, and so what follows it."""
  monkeypatch.setattr(texts.stores, "at", mock.MagicMock())
  assert texts.is_beir("https://host/beir/scifact")
  assert not texts.is_beir("https://host/a.jsonl?download=true")


def test_a_document_without_a_name_has_its_place(tmp_path):
  documents = [{"_id": None, "text": "a"}, {"_id": "", "text": "b"}]
  folder = write(tmp_path, [*documents, {"_id": "\0x", "text": "c"}])
  items = [*texts.find(folder, "text", "id").read()]
  assert [text for _, text in items] == ["a", "b", "c"]
  names = [name for name, _ in items]
  assert names[0].endswith("corpus.jsonl:0") and names[2].strip() == "x"
  assert ":" in names[1]


def test_a_text_is_no_wrong_answer_to_itself():
  pairs = ["ab", "ba", "cd", "dc"]
  collection = collection_of(Pair(*pair) for pair in pairs)
  vector_of = {"a": [1, 0.0], "b": [1, 0.1], "c": [0, 1], "d": [0.1, 1]}
  both = [*collection.queries.values(), *collection.documents.values()]
  vectors = np.array([vector_of[text] for text in both])
  results = measured_search(collection, True, vectors)
  assert results["ndcg_at_10"] == results["mrr_at_10"] == 1


def test_vectors_and_words_are_measured(tmp_path, monkeypatch):
  collection = beir.read(write(tmp_path))
  documents = np.eye(3)
  queries = np.array([[1, 0.5, 0], [0, 0.5, 1]])
  best = nearest.top_k(queries, documents, measures.SEARCHED)
  results = measures.evaluate(collection, *best)
  expected = (1 + (1 + 2 / np.log2(3)) / (2 + 1 / np.log2(3))) / 2
  assert results["ndcg@10"] == pytest.approx(expected)
  with monkeypatch.context() as patch:
    patch.setitem(__import__("sys").modules, "bm25s", None)
    with pytest.raises(UserError, match="-r requirements/search.txt"):
      bm25.search(collection)
  scores, numbers = bm25.search(collection)
  of_query = [{*row[at > 0]} for at, row in zip(scores, numbers, strict=True)]
  assert of_query == [{0}, {1, 2}]
  assert measures.evaluate(collection, scores, numbers)["mrr@10"] == 1
