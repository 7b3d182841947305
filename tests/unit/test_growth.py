"""A larger model made of a smaller one, and runs whose stages grow."""

import json

import numpy as np
import pytest
import reference_modern
import runs
from samples import TINY, write_config
from test_run_pretraining import settled_flags
from test_stages import assert_same_checkpoint, staged

import run_pretraining
from checkpoints import checkpoint_files, metrics
from checkpoints.snapshot import Snapshot
from common.errors import UserError
from common.tensorflow_v1 import tf
from config import stages
from config.bert_config import BertConfig
from config.exchange_config import AllreduceConfig
from config.stages import Growth
from gradients.distributed import Comm
from interop import inference, model_source
from model import growth, weights

LARGE = dict(
  hidden_size=64, num_attention_heads=4, intermediate_size=128,
)  # fmt: skip


def bert(**changes):
  return BertConfig.from_dict({**TINY, **changes})


def grown_of(small, large, method="stack", slots=()):
  """Random values of a small model's state, and a `Grown` of them."""
  rng, values, wanted = np.random.default_rng(3), {}, {}
  for config, made in ((small, True), (large, False)):
    for weight in weights.weights(config):
      if weight.part in weights.PRETRAINED_PARTS:
        for name in (weight.name, *(f"{weight.name}/{slot}" for slot in slots)):
          wanted[name] = list(weight.shape)
          if made:
            values[name] = rng.normal(size=weight.shape)
  how = Growth(small, large, method)
  return values, growth.Grown(values, wanted, how)


@pytest.mark.parametrize(
  "before, now, method, every, want",
  [
    (2, 4, "stack", 1, [0, 1, 0, 1]),
    (2, 4, "interpolate", 1, [0, 0, 1, 1]),
    (2, 5, "stack", 1, [0, 1, 0, 1, 0]),
    (3, 4, "interpolate", 1, [0, 0, 1, 2]),
    (2, 2, "stack", 1, [0, 1]),
    # Layers 0, 3, 6, ... attend to all tokens.
    (3, 6, "stack", 3, [0, 1, 2, 0, 1, 2]),
    (3, 6, "interpolate", 3, [0, 1, 1, 0, 2, 2]),
    (4, 6, "stack", 3, [0, 1, 2, 3, 1, 2]),
    (1, 3, "stack", 2, [0, 0, 0]),
  ],
)
def test_the_layer_that_a_layer_is_a_copy_of(before, now, method, every, want):
  small, large = (
    bert(num_hidden_layers=n, global_attn_every_n_layers=every)
    for n in (before, now)
  )
  assert growth.layers(Growth(small, large, method)) == want


def test_deeper_models_have_the_values_of_layers_and_their_slots():
  small, large = bert(num_hidden_layers=2), bert(num_hidden_layers=4)
  slots = ("adam_m", "muon_m")
  values, grown = grown_of(small, large, "interpolate", slots)
  kernel = "bert/encoder/layer_{}/output/dense/kernel"
  for suffix in ("", "/adam_m", "/muon_m"):
    for layer, source in enumerate([0, 0, 1, 1]):
      want = values[kernel.format(source) + suffix]
      np.testing.assert_array_equal(grown[kernel.format(layer) + suffix], want)


@pytest.mark.parametrize("method", ["stack", "interpolate"])
def test_a_layer_reads_through_the_norm_that_its_source_reads_through(method):
  """It is stored with the layer before, and the last one is that of outputs."""
  keys = {"pre_layer_norm": True, "num_hidden_layers": 2}
  how = bert(**keys), bert(**{**keys, "num_hidden_layers": 4}), method
  values, grown = grown_of(*how)
  copies = growth.layers(Growth(*how))

  def read_by(layer):
    before = f"encoder/layer_{layer - 1}/output" if layer else "embeddings"
    return f"bert/{before}/LayerNorm/gamma"

  for layer, source in enumerate([*copies, 2]):
    np.testing.assert_array_equal(
      grown[read_by(layer)], values[read_by(source)]
    )
  block = "bert/encoder/layer_{}/attention/output/LayerNorm/gamma"
  for layer, source in enumerate(copies):
    want = values[block.format(source)]
    np.testing.assert_array_equal(grown[block.format(layer)], want)


def test_all_heads_read_what_a_norm_has_shared_once():
  keys = {"classifier_pooling": "mean", "num_hidden_layers": 1}
  name = "cls/seq_relationship/output_weights"
  values, grown = grown_of(bert(**keys), bert(**keys, **LARGE))
  np.testing.assert_array_equal(grown[name], np.tile(values[name], (1, 2)))
  # With a pooler it reads what none has shared.
  values, grown = grown_of(bert(), bert(**LARGE))
  both = grown[name].reshape([2, 2, -1]).sum(axis=1)
  np.testing.assert_allclose(both, values[name])


@pytest.mark.parametrize(
  "keys",
  [
    {}, {"pre_layer_norm": True}, {"tie_word_embeddings": False},
    *reference_modern.ARCHITECTURES.values(),
  ],
  ids=str,
)  # fmt: skip
def test_twice_the_width_computes_the_same(keys):
  """By the NumPy model; copies of a unit have unequal weights."""
  size = {"num_hidden_layers": 3, **keys}
  heads = keys.get("num_key_value_heads")
  more = {"num_key_value_heads": 2 * heads} if heads else {}
  small, large = (
    bert(**size),
    bert(**size, **LARGE | more)
    if not heads
    else (bert(**{**size, **LARGE, **more})),
  )
  values, grown = grown_of(small, large)
  logits = []
  for config, made in ((small, values), (large, grown)):
    known = vars(config)
    output = reference_modern.encoder(
      known, made, np.arange(9), np.ones([9, 9], bool), np.arange(9) % 2,
      np.arange(9),
    )[-1]  # fmt: skip
    logits.append(reference_modern.masked_lm_logits(known, made, output))
  np.testing.assert_allclose(logits[1], logits[0], rtol=1e-6, atol=1e-8)
  kernel = grown["bert/encoder/layer_1/attention/self/query/kernel"]
  assert np.abs(kernel[:32] - kernel[32:]).max() > 0.01


def test_moments_are_those_of_the_larger_models_gradients():
  """A unit's copies share its gradient; a third of the width has two copies."""
  small = bert()
  large = bert(hidden_size=48, num_attention_heads=3)
  slots = {"adam_m": 1, "new_m": 1, "powersgd_error": 1, "adam_v": 2}
  values, grown = grown_of(small, large, slots=slots)
  copies = np.array([2] * 16 + [1] * 16 + [2] * 16)
  tiled = np.arange(48) % 32
  for slot, power in slots.items():
    name = f"bert/encoder/layer_0/attention/self/query/kernel/{slot}"
    want = values[name][tiled][:, tiled] / copies**power
    np.testing.assert_allclose(grown[name], want)
  weight = "bert/encoder/layer_0/output/dense/kernel"  # [64, 48]
  np.testing.assert_array_equal(grown[weight], values[weight][:, tiled])


def test_an_average_grows_as_its_weight_does():
  """Copies of a unit have equal shares of both."""
  values, grown = grown_of(bert(), bert(**LARGE), slots=("average",))
  trained = [name for name in values if not name.endswith("/average")]
  for name in trained:
    values[f"{name}/average"] = values[name]
    np.testing.assert_array_equal(grown[f"{name}/average"], grown[name])


def test_what_differs_otherwise_is_no_growth():
  name = "bert/embeddings/word_embeddings"
  values = {name: np.ones([100, 32]), "skipped_updates": np.ones([])}
  shapes = {n: list(np.shape(v)) for n, v in values.items()}
  wanted = {name: [90, 64], "skipped_updates": [], "bert/new": [1]}
  how = Growth(bert(), bert(**LARGE), "stack")
  assert growth.Grown(values, wanted, how).shapes == shapes


SMALL = {
  "stack": {"num_hidden_layers": 1},
  "interpolate": {
    "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1,
    "intermediate_size": 32,
  },
}  # fmt: skip
PLAIN = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def growing(method, **changes):
  """Settings of 3 updates of a small model, and of 4 of TINY."""
  batch = {"global_batch_size": 12}
  items = (
    {"num_train_steps": 3, **batch, **SMALL[method], "sampled_softmax": 20},
    {"num_train_steps": 4, **batch, "growth": method},
  )
  return staged(*items, **{"bert": bert(**PLAIN), **changes})


@pytest.mark.parametrize(
  "method, optimizer", [("stack", "adamw"), ("interpolate", "muon")]
)
def test_a_run_that_grows(tiny_run, tmp_path, capsys, method, optimizer):
  """Killed at the border and after it; each checkpoint has its model."""
  whole, killed, hand = (tmp_path / n for n in ("whole", "killed", "hand"))
  optimizer = {"optimizer": {"optimizer": optimizer}, "average_updates": 5}
  settings = growing(method, **optimizer)
  runs.pretrain(tiny_run, whole, **settings)
  said = capsys.readouterr().err
  assert "stage 1: 3 updates of 12 examples, num_hidden_layers 1, " in said
  assert f"the model grows by {method}: num_hidden_layers 1 -> 2" in said
  for update in (3, 5):
    with runs.ended_after(update):
      runs.pretrain(tiny_run, killed, **settings)
    config, _ = settled_flags(
      do_train=False, do_eval=True, input_file=tiny_run[1],
      output_dir=str(killed), max_eval_steps=1, max_seq_length=32,
      max_predictions_per_seq=5, xla="off",
    )  # fmt: skip
    results = run_pretraining.pretrain(config, Comm())["evaluation"]
    assert results["global_step"] == update
  runs.pretrain(tiny_run, killed, **settings)
  for step in (3, 7):
    assert_same_checkpoint(killed, whole, step)
  # The first stage is a run of the small model.
  small = bert(**SMALL[method], **PLAIN)
  item = {"num_train_steps": 3, "global_batch_size": 12, "sampled_softmax": 20}
  runs.pretrain(tiny_run, hand, **staged(item, bert=small, **optimizer))
  assert_same_checkpoint(hand, whole, 3)
  for step, want in ((3, small), (7, bert())):
    source = model_source.find(str(whole / f"model.ckpt-{step}"))
    assert not source.bert.differences(want)
    inference.open_model(source).close()
  kept = BertConfig.from_json_file(str(whole / "bert_config.json"))
  assert not kept.differences(bert())


@pytest.mark.parametrize("elastic", [False, True])
def test_what_only_the_larger_model_has_begins_anew(
  tiny_run, tmp_path, elastic
):
  """PowerSGD compresses more of its matrices, from disk and from memory."""
  comm = Comm()
  comm.elastic = elastic
  settings = growing("interpolate", allreduce=AllreduceConfig(powersgd_rank=5))
  config = runs.config(tiny_run, tmp_path, **settings)
  run_pretraining.pretrain(config, comm, Snapshot() if elastic else None)
  small, large = (
    checkpoint_files.Checkpoint(str(tmp_path / f"model.ckpt-{step}")).shapes
    for step in (3, 7)
  )
  of_error = [n for n in large if n.endswith("/powersgd_error")]
  assert any(n in small for n in of_error)
  assert not all(n in small for n in of_error)


def test_a_stage_without_updates_has_no_evaluation(tiny_run, tmp_path):
  """Its larger model is in no checkpoint."""
  settings = staged(
    {"time_share": 0.5, "num_hidden_layers": 1}, {"time_share": 0.5},
    max_train_minutes=600.0, num_train_steps=3, global_batch_size=12,
    bert=bert(**PLAIN), do_eval=True, eval_input_file=tiny_run[1],
  )  # fmt: skip
  assert not runs.pretrain(tiny_run, tmp_path, **settings)["evaluation"]
  (kept,) = metrics.evaluations(str(tmp_path))
  settings |= {"do_train": False, "stages": None, "max_train_minutes": 0.0}
  again = runs.pretrain(tiny_run, tmp_path, **settings)["evaluation"]
  assert again["global_step"] == kept["global_step"] == 3
  assert again["masked_lm_loss"] == kept["masked_lm_loss"]


def test_memory_is_not_compared_with_what_the_run_began_from(
  tiny_run, tmp_path
):
  """Rank 0 was lost before its first save."""
  first, folder, comm, kept = tmp_path / "a", tmp_path / "b", Comm(), Snapshot()
  runs.pretrain(
    tiny_run, first, num_train_steps=2, num_warmup_steps=0,
    max_train_minutes=60.0,
  )  # fmt: skip
  comm.elastic = True
  config = runs.config(
    tiny_run, folder, num_train_steps=5, num_warmup_steps=0,
    global_batch_size=12, commit_every_steps=1, save_checkpoints_steps=0,
    init_checkpoint=f"{first}/model.ckpt-2",
  )  # fmt: skip
  with runs.ended_after(3):
    run_pretraining.pretrain(config, comm, kept)
  assert kept.step == 3 and not [*folder.glob("model.ckpt*")]
  run_pretraining.pretrain(config, comm, kept)
  updates = runs.metrics(folder, "global_step")
  assert updates == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
  "first, last, words",
  [
    ({"num_hidden_layers": 3}, {}, "stage 2: num_hidden_layers 3 -> 2: a mode"),
    ({"num_attention_heads": 1}, {}, "stage 2: .* keeps heads of 32 numbers"),
    ({"num_key_value_heads": 1}, {}, "stage 2: .* and 2 of them for one"),
    ({"hidden_size": 31}, {}, "stage 1: .*hidden_size 31 is not a multiple"),
    ({}, {"num_hidden_layers": 3}, "num_hidden_layers in the last stage"),
    ({"growth": "tile"}, {}, "growth is 'tile', not stack or interpolate"),
    ({"sampled_softmax": -1}, {}, "stage 1: --sampled_softmax=-1"),
  ],
)
def test_growth_that_cannot_be(tiny_run, tmp_path, first, last, words):
  items = [{"num_train_steps": 2, **item} for item in (first, last)]
  with pytest.raises(UserError, match=words):
    config = runs.config(tiny_run, tmp_path, **staged(*items, bert=bert()))
    stages.configs(config)


def test_a_run_starts_from_a_model_of_its_first_stage(tiny_run, tmp_path):
  model, file = tmp_path / "model", tmp_path / "stages.json"
  model.mkdir()
  write_config(model / "bert_config.json", num_hidden_layers=1)
  checkpoint_files.write_weights(f"{model}/x.ckpt", {"x": np.zeros(1)})
  large = write_config(tmp_path / "large.json")
  given = dict(
    input_file=tiny_run[1], output_dir=str(tmp_path / "new"), stages=str(file),
    init_checkpoint=str(model), bert_config_file=large, global_batch_size=4,
  )  # fmt: skip
  items = [
    {"num_train_steps": 1, "num_hidden_layers": 1},
    {"num_train_steps": 1},
  ]
  file.write_text(json.dumps(items))
  config, lines = settled_flags(**given)
  assert config.bert.num_hidden_layers == 2
  assert lines[-1].endswith("bert_config.json by other num_hidden_layers")
  file.write_text(json.dumps(items[1:]))
  with pytest.raises(UserError, match="differ in num_hidden_layers"):
    settled_flags(**given)


def test_memory_for_a_copy_grows_with_the_model():
  kept = Snapshot()
  for size in (2, 2, 3):
    with tf.Graph().as_default():
      kept.prepare({"a": tf.zeros([size])})
    before = kept.values
    assert kept.next_values()["a"].shape == (size,)
    kept.finish(size)
  assert before["a"].shape == (2,)
