"""Initial weights: what the first layer attends to, how a run begins."""

import dataclasses
import itertools
from unittest import mock

import numpy as np
import pytest
import runs
from scipy import sparse, special

import input_pipeline
import modeling
from checkpoints import description
from common import json_files
from common.errors import UserError
from common.tensorflow_v1 import tf
from config.bert_config import BertConfig
from interop import run_settings
from model import attention, initial_weights, kernels, weights
from records import cooccurrences, tf_example, tfrecord, unigrams


def neighbours(vocab_size, seed=0):
  """Context words and counts by offset, [V, N], of random text."""
  text = np.random.default_rng(seed).integers(0, vocab_size, 5000)
  counts = unigrams.count([text], vocab_size, [])
  return cooccurrences.count([text], counts)


def attention_of(config, seed):
  """float [N, S, S]: the first layer's mean probabilities, on random words."""
  values = initial_weights.informed(
    config, np.zeros(config.vocab_size), *neighbours(config.vocab_size), seed
  )
  table = values["bert/embeddings/word_embeddings"]
  rng = np.random.default_rng(seed)
  hidden, heads, length = config.hidden_size, config.num_attention_heads, 40
  positions = values["bert/embeddings/position_embeddings"][:length]
  total = np.zeros([heads, length, length])
  for _ in range(50):
    words = table[rng.integers(0, len(table), length)]
    segment = rng.normal(size=hidden) * 0.88 * config.initializer_range
    x = words + positions + segment
    x -= x.mean(-1, keepdims=True)
    x /= x.std(-1, keepdims=True)
    query, key = (
      (x @ values[f"bert/encoder/layer_0/attention/self/{name}/kernel"])
      .reshape(length, heads, -1)
      .swapaxes(0, 1)
      for name in ("query", "key")
    )
    scores = query @ key.swapaxes(1, 2) / np.sqrt(hidden // heads)
    total += special.softmax(scores, axis=-1)
  return total / 50


def expect_neighbours(probs):
  """Each head of float [N, S, S] attends to the token at its own offset."""
  places = np.arange(10, 30)
  for head, around in enumerate(probs):
    own = initial_weights.offsets(len(probs))[head]
    at = {o: around[places, places + o].mean() for o in range(-9, 10)}
    assert max(at, key=at.get) == own, (head, at)
    assert at[own] > 0.35, (head, at)


@pytest.mark.parametrize(
  "hidden, heads, stddev", [(128, 2, 0.05), (256, 4, 0.035), (768, 12, 0.02)]
)
def test_each_head_attends_to_its_neighbour(hidden, heads, stddev):
  config = BertConfig(
    100, hidden_size=hidden, num_attention_heads=heads,
    max_position_embeddings=64, initializer_range=stddev,
  )  # fmt: skip
  expect_neighbours(attention_of(config, seed=3))
  assert initial_weights.offsets(5).tolist() == [-1, 1, -2, 2, -3]


@pytest.mark.parametrize("theta", [10_000.0, 160_000.0])
@pytest.mark.parametrize("hidden, heads", [(128, 2), (256, 4), (768, 12)])
def test_each_rotary_head_attends_to_its_neighbour(hidden, heads, theta):
  """By the model's own rotation, with words by random kernels besides."""
  config = BertConfig(
    100, hidden_size=hidden, num_attention_heads=heads,
    position_type="rotary", global_rope_theta=theta,
  )  # fmt: skip
  values = initial_weights.informed(config, np.zeros(100), *neighbours(100), 3)
  assert "bert/embeddings/position_embeddings" not in values
  rng, length = np.random.default_rng(3), 40
  words = rng.normal(size=[50, length, hidden])
  with tf.Graph().as_default(), tf.Session() as session:
    turns = attention.rotary_tables(config, theta, None, length)
    turned = []
    for name in ("query", "key"):
      x = words @ (rng.normal(size=[hidden, hidden]) * 0.02)
      x += values[f"bert/encoder/layer_0/attention/self/{name}/bias"]
      x = x.reshape(50, length, heads, -1).swapaxes(1, 2).astype("float32")
      turned.append(session.run(kernels.rotate(x, *turns)))
  scores = turned[0] @ turned[1].swapaxes(2, 3) / np.sqrt(hidden // heads)
  expect_neighbours(special.softmax(scores, axis=-1).mean(0))


def test_sinusoids_move_by_rotation():
  """p_{i+o} p_j depends on i + o - j alone and is largest at 0."""
  table = initial_weights.sinusoids(100, 64)
  products = table @ table.T
  for distance in range(1, 60):
    of_distance = np.diagonal(products, distance)
    np.testing.assert_allclose(of_distance, of_distance[0], atol=1e-9)
    assert of_distance[0] < products[0, 0] - 5


def test_contexts_are_counted(monkeypatch):
  """By hand: special tokens and ends of records keep apart."""
  sequences = [np.array([9, 1, 2, 1, 9, 3, 9]), np.array([3, 1])]
  counts = unigrams.count(sequences, 10, [9])
  assert counts.tolist() == [0, 3, 1, 2] + 6 * [0]
  context_words, got = cooccurrences.count(sequences, counts)
  assert context_words[:3].tolist() == [1, 3, 2]
  want = {offset: np.zeros([10, 10]) for offset in (-2, -1, 1, 2)}
  for token, offset, other in [
    (1, 1, 2), (2, -1, 1), (2, 1, 1), (1, -1, 2), (1, -2, 1), (1, 2, 1),
    (3, 1, 1), (1, -1, 3),
  ]:  # fmt: skip
    want[offset][token][context_words.tolist().index(other)] += 1
  assert got.keys() == want.keys()
  for offset, counted in got.items():
    assert counted.toarray().tolist() == want[offset].tolist()
  # Only frequent words are contexts.
  monkeypatch.setattr(cooccurrences, "MAX_CONTEXT_WORDS", 1)
  context_words, got = cooccurrences.count(
    [np.array([1, 2, 1])], np.array([0, 2, 1, 0])
  )
  assert context_words.tolist() == [1]
  rows = np.concatenate([got[o].toarray() for o in (-2, -1, 1, 2)], axis=1)
  assert rows.tolist() == [[0] * 4, [1, 0, 0, 1], [0, 1, 1, 0], [0] * 4]


@pytest.mark.parametrize("isolated", [0, 1, 3])
def test_word_embeddings_are_the_factors_of_their_definition(isolated):
  """Against dense singular vectors, whatever the basis.

  Words that stand with no others add vectors of the size of the one that is
  left out.
  """
  rng = np.random.default_rng(2)
  of, hidden = 30 + isolated, 20
  matrix = np.zeros([of, 2 * of])
  matrix[:30, :60] = rng.integers(1, 50, [30, 60]) * 1e6  # nothing at random
  for word in range(30, of):
    matrix[word, 60 + word - 30] = 1e8
  parts = {1: matrix[:, :of], -1: matrix[:, of:]}
  got, contexts = initial_weights.factors(
    {offset: sparse.csr_array(part) for offset, part in parts.items()},
    hidden, 5,
  )  # fmt: skip
  roots = np.sqrt(matrix)
  r, c = roots.sum(1), roots.sum(0)
  frequency = np.sqrt(r / r.sum())
  scaled = roots / np.sqrt(np.outer(r, np.where(c, c, 1.0)))
  left = scaled - np.outer(frequency, frequency @ scaled)
  u, s, vt = np.linalg.svd(left)
  want = u[:, :hidden] * np.sqrt(s[:hidden])
  want /= np.linalg.norm(want, axis=1, keepdims=True)
  np.testing.assert_allclose(got @ got.T / hidden, want @ want.T, atol=0.02)
  # Contexts are in the same basis; the isolated words' are the last columns.
  right = vt[:hidden, :60].T * np.sqrt(s[:hidden])
  right /= np.linalg.norm(right, axis=1, keepdims=True)
  assert list(contexts) == [1, -1]
  both = np.concatenate(list(contexts.values()))[:60]
  np.testing.assert_allclose(got @ both.T / hidden, want @ right.T, atol=0.05)


def test_rare_words_are_partly_random():
  """What two seeds agree on of a word that was seen 2 to 2,000 times.

  That is its cosines with frequent words; their mean square falls as 20 / n.
  """
  rng = np.random.default_rng(0)
  matrix = rng.integers(0, 1000, [40, 200]).astype(np.float32)
  seen = [2, 20, 200, 2000]
  rows = [rng.multinomial(n, matrix[0] / matrix[0].sum()) for n in seen]
  matrix = sparse.csr_array(np.concatenate([matrix, rows]))
  products = []
  for seed in range(2):
    words, _ = initial_weights.factors({1: matrix}, 30, seed)
    np.testing.assert_allclose(np.square(words).mean(1), 1.0, rtol=1e-5)
    products.append(words @ words[:40].T / 30)
  apart = np.abs(products[0] - products[1]).mean(1)
  assert apart[:40].max() < 0.01
  assert (apart[40:-1] > 1.2 * apart[41:]).all(), apart[40:]
  assert apart[40] > 0.15, apart[40]


@pytest.mark.parametrize(
  "text", [[], [[3]], [[3, 3]], [[2, 2]], [[0, 0, 0]], [[1, 2] * 50]]
)
def test_words_of_next_to_no_text(text):
  """More numbers than words, no contexts: rows of full size, apart."""
  sequences = [*map(np.array, text)]
  counts = unigrams.count(sequences, 30, [])
  context_words, counted = cooccurrences.count(sequences, counts)
  words, _ = initial_weights.factors(counted, 512, seed=2**63 - 1)
  assert np.abs(words @ words.T / 512 - np.eye(30))[3:, 3:].max() < 0.3
  np.testing.assert_allclose(np.square(words).mean(1), 1.0, rtol=1e-5)
  config = BertConfig(
    30, hidden_size=512, num_attention_heads=8, position_type="rotary"
  )
  values = initial_weights.informed(
    config, np.zeros(30), context_words, counted, 3
  )
  assert all(np.isfinite(value).all() for value in values.values())


def pairs_text():
  """Each of 40 words with the one of 40 others that stands after it."""
  rng = np.random.default_rng(1)
  after = 40 + rng.permutation(40)
  first = rng.integers(0, 40, 8000)
  return np.stack([first, after[first]], axis=1).ravel(), after


def small(vocab_size, layers=2, position_type="rotary"):
  return BertConfig(
    vocab_size, hidden_size=128, num_hidden_layers=layers,
    num_attention_heads=2, intermediate_size=256, initializer_range=0.035,
    position_type=position_type,
  )  # fmt: skip


def test_heads_predict_what_stands_beside():
  text, after = pairs_text()
  context_words, counted = cooccurrences.count(
    [text], unigrams.count([text], 80, [])
  )
  words, contexts = initial_weights.factors(counted, 64, 3)
  known = words[context_words], contexts[-1], counted[-1].sum(axis=0)
  value, output = initial_weights.predicting_kernels(*known, heads=1)
  best = np.argmax(words[:40] @ value @ output @ words.T, axis=1)
  assert (best == after).mean() > 0.9, best


@pytest.mark.parametrize("heads", [1, 2])
def test_heads_are_the_largest_part_of_weighted_least_squares(heads):
  """Of contexts that no map fits, with counts that differ by a thousand."""
  rng = np.random.default_rng(6)
  words, contexts = rng.normal(size=[2, 200, 32])
  counts = np.geomspace(1, 1000, 200)
  value, output = initial_weights.predicting_kernels(
    words, contexts, counts, heads
  )
  weighted = words * np.sqrt(counts)[:, None]
  solved = np.linalg.solve(words.T @ weighted, weighted.T @ contexts)
  left, sizes, right = np.linalg.svd(solved)
  kept = 32 // heads
  want = left[:, :kept] * sizes[:kept] @ right[:kept]
  want /= np.std(words @ want) * np.sqrt(heads)
  assert value.shape == (32, kept)
  np.testing.assert_allclose(value @ output, want, atol=1e-6)
  assert np.std(words @ value) == pytest.approx(1)


@pytest.mark.parametrize(
  "layers, positions, changes",
  [
    *itertools.product((1, 2, 3), ("absolute", "rotary"), ({},)),
    (2, "rotary", {"tie_word_embeddings": False}),
    (2, "rotary", {"num_key_value_heads": 2}),
  ],
)
def test_a_model_predicts_neighbours_before_its_first_update(
  layers, positions, changes
):
  """What is masked after a word of `pairs_text`, by the whole model."""
  text, _ = pairs_text()
  config = dataclasses.replace(small(81, layers, positions), **changes)
  counts = unigrams.count([text], 81, [])
  values = initial_weights.informed(
    config, unigrams.log_frequencies(counts),
    *cooccurrences.count([text], counts), 3,
  )  # fmt: skip
  shapes = {w.name: w.shape for w in weights.weights(config)}
  for name, value in values.items():
    assert value.shape == shapes[name], name
  rows, masked = text[: 40 * 32].reshape(40, 32), [5, 17, 25]
  labels = rows[:, masked]
  rows[:, masked] = 80  # [MASK]
  right = []
  for seed in range(3):  # of all other weights
    with tf.Graph().as_default(), tf.Session() as session:
      tf.set_random_seed(seed)
      model = modeling.BertModel(
        config, False, tf.constant(rows, tf.int32), scope="bert"
      )
      logits = modeling.masked_lm_logits(
        config, model.get_sequence_output(), model.get_embedding_table(),
        tf.constant([masked] * 40, tf.int32),
      )  # fmt: skip
      session.run(tf.global_variables_initializer())
      for variable in tf.global_variables():
        if variable.op.name in values:
          variable.load(values[variable.op.name], session)
      best = np.argmax(session.run(logits.log_probs()), axis=1)
    right.append((best == labels.ravel()).mean())
  # By chance it is one of 40. Absolute positions are most of what heads read.
  assert np.mean(right) > (0.25 if positions == "rotary" else 0.12), right


def rotated(heads, position, theta):
  """[n, 2, D] at a position, by the formula of rotary embeddings."""
  size = heads.shape[-1]
  angles = position * theta ** (-np.arange(0, size, 2) / size)
  first, second = np.split(heads, 2, axis=-1)
  sin, cos = np.sin(angles), np.cos(angles)
  return np.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )


@pytest.mark.parametrize("local", [False, True])
def test_the_second_layer_copies_what_has_the_same_neighbours(local):
  """Nearly as well from 20 tokens away, by the theta of its kind of layer."""
  config = small(300)
  config.global_rope_theta, config.local_rope_theta = 1e4, 1e30
  if local:
    config.global_attn_every_n_layers = 3
    config.global_rope_theta, config.local_rope_theta = 1e30, 1e4
  values = initial_weights.informed(config, np.zeros(300), *neighbours(300), 3)
  table = values["bert/embeddings/word_embeddings"]
  table = table / np.std(table, axis=1, keepdims=True)

  def kernel(layer, name):
    return values[f"bert/encoder/layer_{layer}/attention/{name}/kernel"]

  def hidden(own, left, right):
    """Tokens, [n, H], after the first layer's heads, which look beside them."""
    value, output = kernel(0, "self/value"), kernel(0, "output/dense")
    beside = np.concatenate(
      [table[left] @ value[:, :64], table[right] @ value[:, 64:]], axis=1
    )
    return table[own] + beside @ output

  def heads(tokens, name, position):
    projected = tokens @ kernel(1, f"self/{name}")
    return rotated(projected.reshape(-1, 2, 64), position, 1e4)

  rng = np.random.default_rng(4)
  own, other, left, right, third, fourth = rng.integers(0, 300, [6, 500])
  gains = []
  for distance in (0, 20):
    query = heads(hidden(own, left, right), "query", 0)
    same, one, none = (
      np.sum(query * heads(hidden(other, *beside), "key", distance), axis=-1)
      for beside in [(left, right), (left, third), (fourth, third)]
    )
    spread = np.std(none) / 2
    assert same.mean() > one.mean() + spread > none.mean() + 2 * spread
    gains.append(same.mean() - none.mean())
  assert gains[1] > 0.8 * gains[0], gains
  copied = kernel(1, "self/value") @ kernel(1, "output/dense")
  np.testing.assert_allclose(copied, np.eye(128), atol=1e-5)
  one_layer = initial_weights.informed(
    small(300, 1), np.zeros(300), *neighbours(300), 3
  )
  assert not any("layer_1" in name for name in one_layer)


def text_of(folder):
  """Lists of ids of data*.tfrecord before masking; [CLS] and [SEP] if known."""
  files = tfrecord.RecordSet(sorted(map(str, folder.glob("data*.tfrecord"))))
  made, firsts, lasts = [], set(), set()
  for number in range(len(files)):
    record = tf_example.decode_example(files.read(number))
    ids = np.array(record["input_ids"])
    length = np.count_nonzero(record["input_mask"])
    if number < 10:
      firsts.add(ids[0])
      lasts.add(ids[length - 1])
    if "masked_lm_ids" in record:
      used = np.array(record["masked_lm_weights"]) > 0
      places = np.array(record["masked_lm_positions"])[used]
      ids[places] = np.array(record["masked_lm_ids"])[used]
    made.append(ids[:length].tolist())
  return made, [ids.pop() for ids in (firsts, lasts) if len(ids) == 1]


def counted(folder, vocab_size, special=()):
  """Log frequencies [V], context words and counts of the text in a folder."""
  made, found = text_of(folder)
  special = [*special, *found]
  counts = np.bincount(sum(made, []), minlength=vocab_size)
  counts[special] = 0
  assert counts.sum() > 1000
  contexts = cooccurrences.count([*map(np.array, made)], counts)
  return np.log((counts + 1) / (counts + 1).sum()), *contexts


GIVEN = dict(num_train_steps=1, num_warmup_steps=0, learning_rate=1e-12)


@pytest.mark.parametrize("kind", ["plain", "dynamic"])
def test_a_run_begins_with_them(request, tmp_path, kind, monkeypatch):
  """All other weights are those of a run that begins at random.

  Records without a manifest, and packed ones with a manifest and no masks, of
  which two tokens count as special.
  """
  special = [3, 7] if kind == "dynamic" else []
  if special:
    monkeypatch.setattr(input_pipeline.Source, "special_ids", lambda _: special)
  given = dict(GIVEN)
  if kind == "plain":
    tiny = request.getfixturevalue("tiny_run")
  else:
    tiny, given["global_batch_size"] = request.getfixturevalue("dynamic_run")
    given["max_predictions_per_seq"] = None
  runs.trained(tiny, tmp_path / "random", **given)
  given["initial_weights"] = "informed"
  made = runs.config(tiny, tmp_path / "informed", **given)
  odd = BertConfig(9, hidden_size=5, num_attention_heads=1)
  with pytest.raises(UserError, match="hidden_size=5 is odd"):
    dataclasses.replace(made, bert=odd)
  runs.pretrain(tiny, tmp_path / "informed", **given)
  known = counted(tmp_path, made.bert.vocab_size, special)
  want = initial_weights.informed(made.bert, *known, made.seed)
  random = runs.weights(tmp_path / "random")
  informed = runs.weights(tmp_path / "informed")
  assert want.keys() < random.keys() == informed.keys()
  for name, value in informed.items():
    of = want if name in want else random
    if name.startswith(("bert", "cls")) and "adam" not in name:
      np.testing.assert_allclose(value, of[name], atol=1e-9, err_msg=name)
  for name, value in want.items():
    assert not np.allclose(random[name], value, atol=0.01), name


def test_a_checkpoint_wins_over_them(tiny_run, tmp_path):
  """What it lacks is informed; if it lacks nothing, no record is counted."""
  runs.trained(tiny_run, tmp_path / "whole", **GIVEN)
  whole = runs.weights(tmp_path / "whole")
  bias = "cls/predictions/output_bias"
  with tf.Graph().as_default(), tf.Session() as session:
    kept = {n: v for n, v in whole.items() if n != bias and "adam" not in n}
    variables = [tf.Variable(v, name=n) for n, v in kept.items()]
    session.run(tf.global_variables_initializer())
    tf.train.Saver(variables).save(session, str(tmp_path / "part" / "x.ckpt"))
  given = GIVEN | {"initial_weights": "informed"}
  runs.pretrain(
    tiny_run, tmp_path / "partly",
    init_checkpoint=str(tmp_path / "part" / "x.ckpt"), **given,
  )  # fmt: skip
  for name, value in runs.weights(tmp_path / "partly").items():
    if name in kept and name.startswith(("bert", "cls")):
      np.testing.assert_allclose(value, whole[name], atol=1e-9, err_msg=name)
  logs, *_ = counted(tmp_path, 100)
  got = runs.weights(tmp_path / "partly")[bias]
  np.testing.assert_allclose(got, logs, atol=1e-6)
  with mock.patch.object(unigrams, "texts", side_effect=AssertionError):
    runs.pretrain(
      tiny_run, tmp_path / "again",
      init_checkpoint=str(tmp_path / "whole" / "model.ckpt-1"), **given,
    )  # fmt: skip


def test_what_began_a_run_is_a_fact_of_its_first_start(tiny_run, tmp_path):
  """Not of one that resumes it, nor of an older version's file that says so."""
  folder, given = tmp_path / "whole", {**GIVEN, "num_train_steps": 2}
  other = dict(init_checkpoint="other", initial_weights="informed")
  runs.trained(tiny_run, folder, **GIVEN)
  runs.pretrain(tiny_run, folder, rewarmup=False, **other, **given)
  path = folder / "run.json"
  content = json_files.read(str(path))
  old = {**content["runs"][1], "first_update": 1}
  del old["resumed"]
  old["flags"] = {**old["flags"], **other, "learning_rate": 7.0}
  for starts in (content["runs"], [content["runs"][0], old]):
    json_files.write(str(path), {"runs": starts})
    flags = description.read(str(folder)).training["flags"]
    assert flags["init_checkpoint"] is None and flags["rewarmup"]
    assert flags["initial_weights"] == "random"
  assert flags["learning_rate"] == 7.0
  # A start that saved nothing did not begin the run that there is.
  json_files.write(str(path), {"runs": [{**old, "first_update": 0}] * 2})
  flags = description.read(str(folder)).training["flags"]
  assert flags["initial_weights"] == "informed"
  # Nor did it choose the checkpoint of a cooldown.
  starts = []
  for step in (5, 6):
    flags = {**old["flags"], "cooldown_from": f"long/model.ckpt-{step}"}
    starts.append({**old, "first_update": step, "flags": flags})
    starts[-1]["resumed"] = False
  json_files.write(str(path), {"runs": starts})
  for given, branch in (({"do_train": True}, "long/model.ckpt-6"), ({}, None)):
    assert run_settings.find_origin(str(folder), given).branch == branch
  json_files.write(str(path), content)
  given = dict(other, init_checkpoint="./other", rewarmup=False)
  lines = run_settings.find_origin(str(folder), given).lines
  end = f" is ignored: {folder} holds a run that has begun"
  assert [line.removesuffix(end) for line in lines] == [
    "--init_checkpoint=./other", "--initial_weights=informed",
    "--rewarmup=false",
  ]  # fmt: skip
