"""tools.embed, tools.search and tools.mine_negatives by a tiny model."""

import io
import json
import shutil
import sys

import numpy as np
import pytest
import test_retrieval
import trained

from common.errors import DataError, UserError
from interop import embedding, inference, model_source, predictions
from retrieval import beir, index, measures, nearest, texts
from tools import embed, mine_negatives, search
from workers import pool, work_dir

TEXTS = ["a b c", "c d e " * 9, "b", "e e d", "c c a b", "d", "a b c d"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, letters):
  """An embedder of random weights, a classifier of pairs, files of TEXTS."""
  path = tmp_path_factory.mktemp("search")
  trained.write_model(path / "model", "embedder", letters)
  trained.write_model(path / "pairs", "classifier", letters)
  task = json.loads((path / "pairs/task.json").read_text())
  task["columns"]["text_pair"] = "second"
  (path / "pairs/task.json").write_text(json.dumps(task))
  rows, objects, corpus = ["id\ttext\n"], [], []
  for n, text in enumerate(TEXTS):
    rows.append(f"{n}\t{text}\n")
    objects.append(json.dumps({"id": f"n{n}", "body": text}))
    # "a b c" has the title "a ": joined by a space
    corpus.append({"_id": f"n{n}", "title": text[:2], "text": text[2:]})
  (path / "t.txt").write_text("\n\n".join(TEXTS))
  (path / "t.tsv").write_text("".join(rows))
  (path / "t.jsonl").write_text("\n".join(objects))
  (path / "beir").mkdir()
  queries = [{"_id": "q1", "text": "b"}, {"_id": "n5", "text": "a b d"}]
  qrels = test_retrieval.HEADER + "q1\tn2\t1\nn5\tn6\t2\n"
  test_retrieval.write(path / "beir", corpus, queries, qrels)
  return path


@pytest.fixture(scope="module")
def embedder(folder):
  return embedding.open_embedder(str(folder / "model"))


@pytest.fixture(scope="module")
def expected(embedder):
  """The vectors of TEXTS, float32 [n, d]."""
  return embedder.embed(TEXTS)


def make_vectors(folder, name, file, **flags):
  """Embeds a file by `tools.embed`; the lines that it prints."""
  settings = embed.EmbedSettings(
    input=str(folder / file), output=str(folder / name), **flags
  )
  return embed.embed(settings, str(folder / "model"), work_dir.alone())


@pytest.mark.parametrize(
  "file, flags",
  [
    ("t.txt", {}),
    ("t.jsonl", {"text_field": "body"}),
    ("t.tsv", {"dtype": "float16"}),
    ("beir", {}),
  ],
)
def test_vectors_are_those_of_the_texts(
  folder, embedder, expected, monkeypatch, file, flags
):
  monkeypatch.setattr(embed, "_CHUNK", 3)
  monkeypatch.setattr(texts, "_PIECE_BYTES", 20)
  if file == "beir":
    documents = beir.read(str(folder / "beir")).documents
    expected = embedder.embed([*documents.values()])
  lines = make_vectors(folder, "v.npy", file, **flags)
  assert lines == [f"{folder}/v.npy: the vectors of 7 texts"]
  vectors = np.load(folder / "v.npy")
  assert vectors.dtype == flags.get("dtype", "float32")
  atol = 2e-3 if vectors.dtype == "float16" else 1e-5
  np.testing.assert_allclose(vectors, expected, atol=atol)
  assert not [*folder.glob("v.npy.*")]


def test_a_stopped_one_goes_on(folder, expected, monkeypatch):
  """With the chunks that it has made, and none of them once more."""
  monkeypatch.setattr(embed, "_CHUNK", 2)
  opened, made = embed.EmbedSettings.open, []

  def stopping(settings, model):
    made.append(model)
    if len(made) == 3:
      raise KeyboardInterrupt
    return opened(settings, model)

  monkeypatch.setattr(embed.EmbedSettings, "open", stopping)
  with pytest.raises(KeyboardInterrupt):
    make_vectors(folder, "s.npy", "t.txt")
  assert not (folder / "s.npy").exists()
  make_vectors(folder, "s.npy", "t.txt")
  assert len(made) == 3 + 2  # of four chunks the first two were kept
  vectors = np.load(folder / "s.npy")
  np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_an_error_does_not_wait_for_the_other_files(folder, monkeypatch):
  """Of which each may take hours."""
  monkeypatch.setattr(embed, "_CHUNK", 2)
  opened, opening = [], embed.EmbedSettings.open

  def open_slowly(settings, model):
    opened.append(pool.stopping.wait(60))
    return opening(settings, model)

  monkeypatch.setattr(embed.EmbedSettings, "open", open_slowly)
  (folder / "bad.jsonl").write_text('{"text": "a"}\n{"other": "b"}\n')
  with pytest.raises(UserError, match="bad.jsonl"):
    make_vectors(folder, "w.npy", f"bad.jsonl,{folder}/t.txt")
  assert opened in ([], [True]) and not pool.stopping.is_set()


def test_a_name_or_package_that_is_wrong_costs_no_vectors(folder, monkeypatch):
  monkeypatch.setattr(embed.EmbedSettings, "open", None)
  with pytest.raises(UserError, match=r"name it \*.npy or \*.parquet"):
    make_vectors(folder, "v.npy.gz", "t.txt")
  monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
  with pytest.raises(UserError, match="v.parquet: .*requirements/text.txt"):
    make_vectors(folder, "v.parquet", "t.txt")


def test_parquet_has_ids_and_empty_texts_are_counted(folder, expected):
  parquet = pytest.importorskip("pyarrow.parquet")
  empty = '{"id": 7, "body": ""}\n'
  (folder / "e.jsonl").write_text(empty + (folder / "t.jsonl").read_text())
  lines = make_vectors(folder, "v.parquet", "e.jsonl", text_field="body")
  assert lines[1] == "of these 1 text without words"
  table = parquet.read_table(folder / "v.parquet").to_pydict()
  assert table["id"] == ["7", *(f"n{n}" for n in range(7))]
  np.testing.assert_allclose(table["embedding"][1:], expected, atol=1e-5)
  for name, file, message in (
    ("v.txt", "t.txt", r"name it \*.npy or \*.parquet"),
    ("v.npy", "t.jsonl", "--text_field=text: .*t.jsonl|t.jsonl: l"),
  ):
    with pytest.raises(UserError, match=message):
      make_vectors(folder, name, file)


def searched(capsys, folder, documents="t.txt", **flags):
  """The lines that a search by flags prints."""
  settings = search.SearchSettings(documents=str(folder / documents), **flags)
  search.main(settings, str(folder / "model"))
  return capsys.readouterr().out.splitlines()


def found(capsys, folder, **flags):
  """[(id, score) of each result] of each query."""
  answers = []
  for line in searched(capsys, folder, json=True, **flags):
    results = json.loads(line)["results"]
    answers.append([(one["id"], one["score"]) for one in results])
  return answers


def test_a_search_finds_the_nearest(
  folder, embedder, expected, capsys, monkeypatch
):
  best, vectors = [], embedder.embed(["a b d", "e"], "query")
  for scores, numbers in zip(*nearest.top_k(vectors, expected, 3), strict=True):
    near = [pytest.approx(score, abs=1e-5) for score in scores]
    best.append([*zip(map(str, numbers), near, strict=True)])
  stdin = io.TextIOWrapper(io.BytesIO(b"a b d\n\ne\n"))
  monkeypatch.setattr(sys, "stdin", stdin)
  np.save(folder / "given.npy", expected.astype(np.float16))
  (folder / "q.txt").write_text("a b d\ne\n")
  flags = dict(documents="t.tsv", top_k=3)
  assert found(capsys, folder, **flags) == best
  queries = str(folder / "q.txt")
  assert found(capsys, folder, queries=queries, **flags) == best
  assert found(capsys, folder, query="e", **flags) == best[1:]
  flags["vectors"] = str(folder / "given.npy")
  (close,) = found(capsys, folder, query="e", **flags)
  assert [n for n, _ in close] == [n for n, _ in best[1]]
  # What people read has the texts, and on stderr the model.
  lines = searched(capsys, folder, query="e", top_k=1)
  assert lines[1].startswith("  1. 0.")
  settings = search.SearchSettings(documents=str(folder / "t.txt"), query="e")
  search.main(settings, str(folder / "model"))
  assert "bert_model.ckpt (the only one)" in capsys.readouterr().err


def test_queries_of_a_folder_are_searched_with(folder, embedder, capsys):
  queries = str(folder / "beir")
  lines = searched(capsys, folder, "beir", queries=queries, json=True)
  assert [json.loads(line)["query"] for line in lines] == ["b", "a b d"]
  lines = make_vectors(folder, "q.npy", "beir", side="query")
  want = embedder.embed(["b", "a b d"], "query")
  np.testing.assert_allclose(np.load(folder / "q.npy"), want, atol=1e-5)


def test_one_text_has_one_vector(embedder, expected):
  np.testing.assert_allclose(embedder.embed(TEXTS[0]), expected[:1], atol=1e-6)


def test_vectors_of_two_models_are_two_plans(folder, tmp_path, monkeypatch):
  """So that none is finished from what the other one left."""
  plans, letters = [], str(folder / "model/vocab.txt")
  monkeypatch.setattr(
    embed.shared_work, "share", lambda make, job, *_: plans.append(job.plan)
  )
  settings = embed.EmbedSettings(
    input=str(folder / "t.txt"), output=str(tmp_path / "v.npy")
  )
  model, export = tmp_path / "model", str(tmp_path / "export")
  for changes in ((), (), [("bert/embeddings/LayerNorm/beta", 1.0)]):
    trained.write_model(model, "embedder", letters, changes)
    source = model_source.find(str(model))
    inference.export(inference.open_checkpoint(source), source, export)
    for path in (str(model), export):
      embed.embed(settings, path, work_dir.alone())
      shutil.rmtree(path)
  for a, b, c in (plans[::2], plans[1::2]):
    assert a == b != c


def test_another_config_is_another_plan(folder, tmp_path, monkeypatch):
  plans, model = [], tmp_path / "model"
  monkeypatch.setattr(
    embed.shared_work, "share", lambda make, job, *_: plans.append(job.plan)
  )
  trained.write_model(model, "embedder", str(folder / "model/vocab.txt"))
  settings = embed.EmbedSettings(
    input=str(folder / "t.txt"), output=str(tmp_path / "v.npy")
  )
  for activation in ("gelu", "relu"):
    config = model / "bert_config.json"
    content = json.loads(config.read_text()) | {"hidden_act": activation}
    config.write_text(json.dumps(content))
    embed.embed(settings, str(model), work_dir.alone())
  assert plans[0] != plans[1]


@pytest.mark.parametrize("label", ["no", "yes", None])
def test_a_reranker_orders_the_first(folder, capsys, label):
  """By what the pairs' model says of the query and each text, in this order."""
  own = dict(query="a b", documents="t.tsv")
  flags = dict(rerank=str(folder / "pairs"), rerank_depth=4, **own)
  (plain,) = found(capsys, folder, top_k=4, **own)
  (new,) = found(capsys, folder, top_k=6, rerank_label=label, **flags)
  assert {n for n, _ in new[:4]} == {n for n, _ in plain}
  values = [score for _, score in new]
  assert values == sorted(values, reverse=True) and values[4] < 0
  pairs = [("a b", TEXTS[int(number)]) for number, _ in new[:4]]
  answers = predictions.load(str(folder / "pairs")).answers(pairs)
  shares = [a["probabilities"][label or "who knows"] for a in answers]
  assert values[:4] == pytest.approx(shares, abs=1e-6)


def test_a_folder_is_evaluated(folder, embedder, capsys):
  flags, model = dict(documents="beir", evaluate=True), str(folder / "model")
  (line,) = searched(capsys, folder, json=True, bm25=False, **flags)
  results = json.loads(line)[model]
  collection = beir.read(str(folder / "beir"))
  queries = embedder.embed([*collection.queries.values()], "query")
  documents = embedder.embed([*collection.documents.values()])
  best = nearest.top_k(queries, documents, measures.SEARCHED)
  assert results == pytest.approx(measures.evaluate(collection, *best))
  rerank = dict(rerank=str(folder / "pairs"), json=True, bm25=False)
  (line,) = searched(capsys, folder, **rerank, **flags)
  assert json.loads(line) != {model: results}
  title, header, words, vectors = searched(capsys, folder, **flags)
  assert title.endswith("beir: 2 queries of test, 7 documents")
  assert header.split() == ["ndcg@10", "mrr@10", "recall@100"]
  assert words.endswith("BM25") and vectors.endswith(model)


@pytest.mark.parametrize(
  "flags, message",
  [
    ({"vectors": "few.npy"}, "few.npy: float32 of the shape \\(3, 32\\), but"),
    ({"vectors": "thin.npy"}, "thin.npy: float32 of the shape \\(7, 2\\), but"),
    ({"vectors": "t.txt"}, "t.txt: no array, but --documents and"),
    ({"rerank": "model"}, "--rerank=.*model: reads no pairs .embedder.: name"),
    (
      {"rerank": "pairs", "rerank_label": "x"},
      "its labels are no, yes, who knows, not x: n",
    ),
    ({"query": " "}, "--query: it is empty"),
    ({"vectors": "no_bytes"}, "no_bytes: no array, but"),
    ({"documents": "blank.txt"}, "--documents=.*blank.txt: no texts"),
    (  # before the vectors, which are wrong, too
      {"query": None, "queries": "no.txt", "vectors": "few.npy"},
      "no.txt: no such file",
    ),
    ({"evaluate": True, "documents": "no"}, "no/corpus.jsonl: No such"),
  ],
)
def test_what_does_not_fit_is_a_line(folder, expected, capsys, flags, message):
  np.save(folder / "few.npy", expected[:3])
  np.save(folder / "thin.npy", expected[:, :2])
  (folder / "no_bytes").touch()
  (folder / "blank.txt").write_text("\n\n")
  for name in {"vectors", "rerank"} & set(flags):
    flags = {**flags, name: str(folder / flags[name])}
  flags = flags if "evaluate" in flags else {"query": "a", **flags}
  with pytest.raises(UserError, match=message):
    searched(capsys, folder, **flags)


def test_an_index_is_made_once_and_finds_the_nearest(tmp_path):
  random = np.random.default_rng(0)
  vectors = random.normal(size=[2000, 16]).astype(np.float32)
  path, size = str(tmp_path / "i"), (2000, 16)
  with pytest.raises(FileNotFoundError):  # before any text is embedded
    index.opened(str(tmp_path / "no" / "i"), size, True, None)
  found = []
  for make in (lambda: vectors, None):  # the second time it is there
    opened = index.opened(path, size, True, make)
    found.append(index.search(opened, vectors[:50], 30))
  np.testing.assert_array_equal(found[0][1], found[1][1])
  exact, numbers = nearest.top_k(vectors[:50], vectors, 30)
  np.testing.assert_allclose(found[0][0][:, 0], exact[:, 0], atol=2e-3)
  pairs = zip(found[0][1], numbers, strict=True)
  shared = np.mean([np.isin(*row).mean() for row in pairs])
  assert shared > 0.98
  with pytest.raises(DataError, match=r"\(2000, 16\), .* \(9, 16\): remove"):
    index.opened(path, (9, 16), True, None)
  # Another file: faiss' threads may still be reading the first one, mapped.
  (tmp_path / "text").write_text("text")
  with pytest.raises(DataError, match="no index of faiss"):
    index.opened(str(tmp_path / "text"), size, True, None)


PAIRS = [("a b", "a b c"), ("a b", "A  B c"), ("c", "c d"), ("d", "e e d")]


def test_negatives_are_mined(folder, embedder, tmp_path):
  lines = [json.dumps(dict(anchor=a, positive=p)) for a, p in PAIRS]
  (tmp_path / "pairs.jsonl").write_text("\n".join(lines))

  def mined(**flags):
    settings = mine_negatives.MiningSettings(
      input=str(tmp_path / "pairs.jsonl"), corpus=str(folder / "t.txt"),
      **{"output": str(tmp_path / "m.jsonl"), "num_negatives": 3, **flags},
    )  # fmt: skip
    mine_negatives.mine(settings, str(folder / "model"))
    return (tmp_path / "m.jsonl").read_text().splitlines()

  # Vectors of random weights differ little.
  for margin in (0.0, 0.002):
    lines = mined(relative_margin=margin)
    assert lines
    for line in lines:
      anchor, positive, negatives = json.loads(line).values()
      assert 1 <= len(negatives) <= 3
      own_texts = [anchor, *(text for query, text in PAIRS if query == anchor)]
      keys = [{*map(mine_negatives.key, t)} for t in (own_texts, negatives)]
      assert keys[0].isdisjoint(keys[1])
      query = nearest.unit(embedder.embed([anchor], "query"))[0]
      texts = embedder.embed([positive, *negatives])
      own, *others = nearest.unit(texts) @ query
      assert max(others) <= own * (1 - margin) + 1e-6
      assert (np.diff(others) <= 1e-5).all()
  for wrong, message in (
    ({"relative_margin": 1.0}, "no pair has a negative within the margin"),
    ({"positive_column": "x"}, "line 1 has no 'x'.*--positive_column"),
    ({"output": str(folder / "t.txt")}, "t.txt is of --corpus, and would be"),
  ):
    with pytest.raises(UserError, match=message):
      mined(**wrong)


@pytest.mark.parametrize("form", ["tsv", "csv", "beir"])
def test_negatives_are_mined_of_each_form(folder, tmp_path, form):
  """The same as of JSON lines: of all texts those of the pairs."""
  pairs = PAIRS[2:]  # of different anchors
  lines = [json.dumps(dict(anchor=a, positive=p)) for a, p in pairs]
  (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
  mark = "\t" if form == "tsv" else ","
  rows = [f"{a}{mark}{p}\n" for a, p in [("anchor", "positive"), *pairs]]
  (tmp_path / f"pairs.{form}").write_text("".join(rows))
  if form == "beir":
    (tmp_path / "pairs.beir").unlink()
    (tmp_path / "pairs.beir").mkdir()
    corpus = [{"_id": p, "title": "", "text": p} for _, p in pairs]
    queries = [{"_id": f"to {p}", "text": a} for a, p in pairs]
    qrels = [f"to {p}\t{p}\t1\n" for _, p in pairs]
    test_retrieval.write(
      tmp_path / "pairs.beir", corpus, queries,
      test_retrieval.HEADER + "".join(qrels),
    )  # fmt: skip
  results = []
  for name in ("jsonl", form):
    settings = mine_negatives.MiningSettings(
      input=str(tmp_path / f"pairs.{name}"), corpus=str(folder / "t.txt"),
      output=str(tmp_path / f"{name}.out.jsonl"), relative_margin=0.0,
      split="test",
    )  # fmt: skip
    mine_negatives.mine(settings, str(folder / "model"))
    results.append((tmp_path / f"{name}.out.jsonl").read_text())
  assert results[0] == results[1] != ""


def test_the_margin_is_a_share_of_the_similarity():
  scores = np.array([0.9, 0.8, 0.7, 0.6, -0.1], np.float32)
  numbers = np.array([4, 7, 1, 3, 2])

  def choose(positive, banned, **flags):
    settings = mine_negatives.MiningSettings(input="", output="", **flags)
    return mine_negatives.choose(settings, positive, banned, scores, numbers)

  assert choose(1, [7]) == [4, 1, 3, 2]
  assert choose(1, [7], num_negatives=2) == [4, 1]
  assert choose(0.85, [-1]) == [7, 1, 3, 2]
  assert choose(0.84, [-1]) == [1, 3, 2]  # 95% are 0.798
  assert choose(-0.09, [-1]) == [2]  # 95% of a distance from 0
  assert not choose(-0.097, [-1])
