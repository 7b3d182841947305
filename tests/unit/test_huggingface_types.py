"""What config.json and tensors of each model type say, and what is refused.

`test_modern_parity.py` holds the numbers against transformers'.
"""

import json
import shutil

import numpy as np
import pytest
import runs
import safetensors.numpy
import tokenizer_folders
from conversions import (
  assert_same,
  convert,
  random_values,
  read,
  write_checkpoint,
)
from reference_modern import EURO_BERT, MODERN_BERT, NEO_BERT
from samples import TINY

from checkpoints import checkpoint_weights, huggingface_folder
from common.errors import UserError
from config import bert_config
from config.bert_config import BertConfig, model_keys
from interop import model_source
from model import (
  huggingface_config,
  huggingface_types,
  huggingface_weights,
  tasks,
  weights,
)
from text_encoders import tokenizer_files
from text_encoders.tokenizer_json import HuggingFaceEncoder

MODERN = {**TINY, **MODERN_BERT, "classifier_pooling": "mean"}
MODERN |= {"num_hidden_layers": 4}
EURO = {**TINY, **EURO_BERT, "classifier_pooling": "mean"}
ROBERTA = {**TINY, "position_offset": 1, "hidden_act": "gelu_erf"}
ROFORMER = {**TINY, "position_type": "rotary"}
POOLED = {**MODERN, "classifier_pooling": "pooler"}
MEAN = {**TINY, "classifier_pooling": "mean"}
MODELS = {"bert": TINY, "modernbert": MODERN, "eurobert": EURO,
          "roberta": ROBERTA, "roformer": ROFORMER}  # fmt: skip
# Another value of each key that a type can say.
OTHERS = dict(
  vocab_size=90, hidden_size=48, num_hidden_layers=5, num_attention_heads=4,
  intermediate_size=40, hidden_act="silu", max_position_embeddings=32,
  type_vocab_size=1, norm_eps=0.01, global_rope_theta=77.0,
  local_rope_theta=55.0, global_attn_every_n_layers=2, local_attention=6,
  num_key_value_heads=2, attention_bias=True, norm_bias=True, mlp_bias=True,
  classifier_bias=True, tie_word_embeddings=False, decoder_bias=False,
  classifier_pooling="cls", position_offset=2,
)  # fmt: skip


def written(keys, heads=(), **ids):
  config = BertConfig.from_dict(keys)
  return config, huggingface_config.to_huggingface_config(
    config, heads, "here", (), ids
  )


def reread(content):
  return huggingface_config.from_huggingface_config(content, "there")


@pytest.mark.parametrize("ours", bert_config.ACTIVATION_NAMES[1:])
def test_activations(ours):
  config, content = written({**TINY, "hidden_act": ours})
  theirs = {"gelu": "gelu_new", "gelu_erf": "gelu"}
  assert content["hidden_act"] == theirs.get(ours, ours)
  assert reread(content).config.to_dict() == config.to_dict()


@pytest.mark.parametrize("name", MODELS)
def test_a_config_survives_both_ways(name):
  config, content = written(MODELS[name])
  assert content["model_type"] == name
  again = reread(content)
  assert again.kind.name == name and not again.left_out
  assert not again.config.differences(config)
  for key in huggingface_types.TYPES[name].keys:
    if key in OTHERS and key in model_keys():
      changed = {**MODELS[name], key: OTHERS[key]}
      if (name, key) == ("eurobert", "mlp_bias"):
        changed["decoder_bias"] = True
      if (name, key) == ("roberta", "hidden_act"):
        continue  # its head knows one
      config, content = written(changed, [tasks.LABELS])
      assert content["model_type"] == name, key
      assert not reread(content).config.differences(config), key


def test_layers_and_wavelengths_are_said_twice():
  """As transformers 4 reads them, and as 5 does."""
  _, content = written(MODERN, pad=0, cls=2, sep=3, mask=4)
  full, sliding = "full_attention", "sliding_attention"
  assert content["layer_types"] == [full, sliding, sliding, full]
  assert content["rope_parameters"] == {
    full: {"rope_type": "default", "rope_theta": 160000.0},
    sliding: {"rope_type": "default", "rope_theta": 10000.0},
  }
  for key, value in (
    ("global_attn_every_n_layers", 3), ("global_rope_theta", 160000.0),
    ("local_rope_theta", 10000.0), ("local_attention", 4),
    ("hidden_activation", "gelu"), ("classifier_activation", "gelu"),
    ("classifier_pooling", "mean"), ("pad_token_id", 0), ("bos_token_id", 2),
    ("cls_token_id", 2), ("eos_token_id", 3), ("sep_token_id", 3),
  ):  # fmt: skip
    assert content[key] == value, key


OLD = dict(
  model_type="modernbert", vocab_size=100, hidden_size=32, num_hidden_layers=4,
  num_attention_heads=2, intermediate_size=64, global_attn_every_n_layers=2,
  global_rope_theta=160000.0, local_rope_theta=10000.0, local_attention=128,
)  # fmt: skip
FULL, NEAR = "full_attention", "sliding_attention"


def rope(theta):
  return {"rope_type": "default", "rope_theta": theta}


def ropes(full, near):
  return {"rope_parameters": {FULL: rope(full), NEAR: rope(near)}}


@pytest.mark.parametrize(
  "change, keys",
  [
    ({}, {}),
    ({"local_rope_theta": None}, {"local_rope_theta": 160000.0}),
    ({"layer_types": [FULL, NEAR, NEAR, FULL]},
     {"global_attn_every_n_layers": 3}),
    ({"layer_types": [FULL] * 4}, {"global_attn_every_n_layers": 1}),
    ({"layer_types": [FULL, NEAR, NEAR, NEAR],
      "global_attn_every_n_layers": 7}, {"global_attn_every_n_layers": 7}),
    (ropes(5.0, 4.0), {"global_rope_theta": 5.0, "local_rope_theta": 4.0}),
    ({"rope_parameters": {FULL: {"rope_theta": 5.0}}},
     {"global_rope_theta": 5.0, "local_rope_theta": 10000.0}),
    ({"rope_parameters": {NEAR: {"type": "default", "rope_theta": 4.0}},
      "rope_scaling": {"type": "default"}}, {"local_rope_theta": 4.0}),
    ({"sliding_window": 8}, {"local_attention": 16}),
    ({"sliding_window": None, "head_dim": 16}, {"local_attention": 128}),
    (dict(hidden_activation="swish", classifier_activation="silu"),
     {"hidden_act": "silu"}),
    (dict(hidden_activation="gelu_python"), {"hidden_act": "gelu_erf"}),
    (dict(hidden_activation="gelu_new", classifier_activation="gelu_fast"),
     {"hidden_act": "gelu"}),
    ({"attention_dropout": 0.2},
     {"attention_probs_dropout_prob": 0.2, "attention_output_dropout": 0.2}),
  ],
)  # fmt: skip
def test_files_of_all_versions_are_read_right(change, keys):
  again = reread({**OLD, **change})
  config = again.config
  assert not again.left_out
  wanted = dict(
    position_type="rotary", norm_eps=1e-5, norm_bias=False, gated=True,
    hidden_act="gelu_erf", classifier_pooling="cls", type_vocab_size=0,
    global_attn_every_n_layers=2, global_rope_theta=160000.0,
    local_rope_theta=10000.0, scaled_initializer=True, hidden_dropout_prob=0.0,
    max_position_embeddings=8192,
  )  # fmt: skip
  wanted |= keys
  assert {key: getattr(config, key) for key in wanted} == wanted


def test_wavelengths_of_eurobert():
  plain = {"model_type": "eurobert"}
  assert reread(plain).config.global_rope_theta == 10000.0
  older = {**plain, "rope_theta": 250000, "rope_scaling": None,
           "clf_pooling": "late", "head_dim": 64}  # fmt: skip
  assert reread(older).config.global_rope_theta == 250000
  newer = {**older, "rope_parameters": rope(9.0)}
  assert reread(newer).config.global_rope_theta == 9.0
  assert not reread(newer).left_out


# Keys that config.json of these has, also those that change nothing.
PUBLISHED = {
  "answerdotai/ModernBERT-base": (
    dict(
      model_type="modernbert", architectures=["ModernBertForMaskedLM"],
      classifier_pooling="mean", classifier_dropout=0.0, mlp_dropout=0.0,
      deterministic_flash_attn=False, global_attn_every_n_layers=3,
      global_rope_theta=160000.0, local_rope_theta=10000.0,
      gradient_checkpointing=False, layer_norm_eps=1e-05,
      position_embedding_type="absolute", bos_token_id=50281,
      cls_token_id=50281, tie_word_embeddings=True, torch_dtype="float32",
      transformers_version="4.47.0.dev0",
    ),
    dict(
      vocab_size=50368, num_hidden_layers=22, intermediate_size=1152,
      classifier_pooling="mean", norm_eps=1e-5, max_position_embeddings=8192,
    ),
  ),
  "EuroBERT/EuroBERT-210m": (
    dict(
      model_type="eurobert", architectures=["EuroBertForMaskedLM"],
      auto_map={"AutoModel": "x"}, bos_token="<s>", clf_pooling="late",
      head_dim=64, hidden_dropout=0.0, mask_token_id=128002,
      num_key_value_heads=12, pretraining_tp=1, rope_scaling=None,
      rope_theta=250000, use_cache=False,
    ),
    dict(
      vocab_size=128256, global_rope_theta=250000, decoder_bias=False,
      tie_word_embeddings=False, norm="rms", hidden_act="silu",
    ),
  ),
  "FacebookAI/roberta-base": (
    dict(
      model_type="roberta", architectures=["RobertaForMaskedLM"],
      layer_norm_eps=1e-05, max_position_embeddings=514, pad_token_id=1,
      type_vocab_size=1, bos_token_id=0, eos_token_id=2,
    ),
    dict(
      vocab_size=50265, position_offset=2, max_position_embeddings=512,
      norm_eps=1e-5, hidden_act="gelu_erf", classifier_pooling="pooler",
    ),
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
  content, wanted = PUBLISHED[name]
  known = reread(content)
  assert not known.left_out
  assert {key: getattr(known.config, key) for key in wanted} == wanted
  assert huggingface_types.nearest(known.config, ()) is known.kind
  assert not known.kind.unsaid(known.config, (), {})


EUROS = {"model_type": "eurobert"}


@pytest.mark.parametrize("name", MODELS)
def test_keys_of_one_value_are_checked(name):
  _, content = written(MODELS[name])
  kind = huggingface_types.TYPES[name]
  for key in kind.checked:
    other = {"a": 1} if isinstance(content.get(key), (dict, list)) else "other"
    with pytest.raises(UserError, match=f"there: {key} is|: {key} is"):
      reread({**content, key: other})
  with pytest.raises(UserError, match="architecture XForY is not one of "):
    reread({**content, "architectures": ["XForY"]})


@pytest.mark.parametrize(
  "content, message",
  [
    ({**OLD, "layer_types": [NEAR, NEAR, FULL, NEAR]}, "there: layer_types is"),
    ({**OLD, "layer_types": [FULL, NEAR, FULL]}, "there: layer_types is"),
    ({**OLD, "layer_types": 5}, "layer_types is 5, not a list"),
    ({**OLD, "rope_parameters": {FULL: {**rope(5.0), "factor": 4},
                                 NEAR: rope(4.0)}}, "there: rope_parameters"),
    ({**OLD, "rope_parameters": rope(5.0)}, "there: rope_parameters"),
    ({**OLD, "rope_scaling": rope(5.0)}, "there: rope_scaling is"),
    ({**OLD, "head_dim": 8}, "there: head_dim is 8, not 16"),
    ({**OLD, "local_rope_theta": -1}, "local_rope_theta is -1, not > 0"),
    ({**OLD, "classifier_pooling": "max"}, "is 'max', not one of cls, mean"),
    ({**OLD, "hidden_activation": "relu"}, "activation is 'gelu', not 'relu'"),
    ({**OLD, "num_hidden_layers": "4"}, "num_hidden_layers is '4', not a pos"),
    ({**EUROS, "rope_parameters": {**rope(9.0), "rope_type": "linear"}},
     "there: rope_parameters is"),
    ({"model_type": "roberta", "hidden_act": "relu"}, "hidden_act is 'relu'"),
    ({"model_type": "roberta", "pad_token_id": "1"}, "pad_token_id is '1'"),
    ({"model_type": "roberta", "max_position_embeddings": 2},
     "max_position_embeddings is 0"),
    ({"model_type": "xlnet"}, "model_type is 'xlnet', not bert or roberta or"),
    ({"hidden_act": ["gelu"]}, "hidden_act is .*'gelu'"),
    ({"architectures": 5}, "the architecture 5 is"),
    ({"hidden_size": 33}, "hidden_size 33 is not a multiple"),
    ({"layer_norm_eps": -1}, "norm_eps is -1, not > 0"),
  ],
)  # fmt: skip
def test_models_that_are_none_of_ours(content, message):
  with pytest.raises(UserError, match=message):
    reread(content)


@pytest.mark.parametrize(
  "keys, message",
  [
    ({**TINY, "pre_layer_norm": True}, "pre_layer_norm is true, .* BERT can"),
    ({**TINY, "type_vocab_size": 0}, "type_vocab_size is 0, .* BERT"),
    ({**TINY, "tie_word_embeddings": False}, "tie_word_embeddings is false"),
    ({**MODERN, "norm": "rms"}, 'norm is "rms", .* ModernBERT cannot'),
    ({**MODERN, "mlm_head": False}, "mlm_head is false, .* ModernBERT"),
    ({**MODERN, "num_key_value_heads": 1}, "num_key_value_heads is 1"),
    ({**TINY, **NEO_BERT}, "decoder_bias is true, .* EuroBERT"),
    ({**EURO, "embedding_norm": True}, "embedding_norm is true, .* EuroBERT"),
    ({**ROBERTA, "position_offset": 2}, r"set is 2.*\[PAD\] plus 1"),
  ],
)  # fmt: skip
def test_models_of_ours_that_hugging_face_does_not_have(keys, message):
  """Refused by the key; the vocabulary's [PAD] is 0."""
  with pytest.raises(UserError, match=message):
    written(keys, pad=0)
  # An equal number of heads says nothing.
  same = {**MODERN, "num_key_value_heads": 2}
  config = BertConfig.from_dict(same)
  assert not huggingface_types.lacks(config, tasks.MASKED_LM, {})


@pytest.mark.parametrize(
  "keys, head, wanted",
  [
    (EURO, tasks.LABELS, "EuroBERT lacks this classifier"),
    (EURO, tasks.QUESTIONS, "EuroBERT lacks this question answering head"),
    (EURO, tasks.TOKENS, ""), (ROBERTA, tasks.LABELS, ""),
    ({**TINY, **NEO_BERT}, tasks.LABELS, "EuroBERT lacks decoder_bias"),
    # With a pooler heads read outputs as they are, without through a layer.
    (POOLED, tasks.MASKED_LM, ""), (MEAN, tasks.MASKED_LM, ""),
    (POOLED, tasks.TOKENS, "ModernBERT lacks classifier_pooling"),
    (MEAN, tasks.TOKENS, "BERT lacks classifier_pooling"),
  ],
)  # fmt: skip
def test_what_a_type_lacks_is_known_before_training(keys, head, wanted):
  pad = {"pad": keys.get("position_offset", 1) - 1}
  found = huggingface_types.lacks(BertConfig.from_dict(keys), head, pad)
  assert found.startswith(wanted) and bool(found) == bool(wanted)


def test_pooling_counts_where_something_is_pooled():
  _, content = written(POOLED, [tasks.MASKED_LM])
  assert content["classifier_pooling"] == "cls"
  with pytest.raises(UserError, match='classifier_pooling is "pooler"'):
    written(POOLED, [tasks.LABELS])


def test_keys_that_nothing_reads_make_no_other_model():
  config = lambda **keys: BertConfig.from_dict({**EURO, **keys})
  for keys in (
    {"classifier_bias": False}, {"local_rope_theta": 3.0},
    {"local_attention": 4}, {"position_offset": 1},
  ):  # fmt: skip
    assert config(**keys).differences(config()) == []
  every = {"global_attn_every_n_layers": 3}
  local = config(**every, local_attention=4)
  assert local.differences(config(**every)) == ["local_attention"]
  reread({"model_type": "bert", "pooler_dropout": 0.1})


# Tensors ----------------------------------------------------------------------


MLM = [weights.ENCODER, weights.TRANSFORM, weights.MASKED_LM]


@pytest.mark.parametrize("keys", [MEAN, ROFORMER])
def test_masked_lms_without_a_pooler(tmp_path, keys):
  parts = [weights.ENCODER, weights.MASKED_LM]
  values = random_values(parts + MLM[1:2] * (keys is MEAN), keys=keys)
  convert(write_checkpoint(tmp_path / "a", values, **keys), tmp_path / "b")
  card = (tmp_path / "b" / "README.md").read_text()
  assert 'pipeline_tag: "fill-mask"' in card
  if keys is MEAN:  # RoFormer's own tokenizer is not read
    convert(tmp_path / "b", tmp_path / "c" / "model")
    assert_same(read(tmp_path / "c" / "model"), values)


def test_tensors_of_several_weights(tmp_path):
  values = random_values(MLM, keys=MODERN)
  prefix = write_checkpoint(tmp_path / "a", values, **MODERN)
  convert(prefix, tmp_path / "b")
  path = str(tmp_path / "b" / "model.safetensors")
  tensors = safetensors.numpy.load_file(path)
  layer = "bert/encoder/layer_1"
  qkv = [values[f"{layer}/attention/self/{n}/kernel"].T
         for n in ("query", "key", "value")]  # fmt: skip
  inner = [values[f"{layer}/intermediate/{n}/kernel"].T
           for n in ("dense", "gate")]  # fmt: skip
  for name, want in (
    ("model.layers.1.attn.Wqkv.weight", np.concatenate(qkv)),
    ("model.layers.1.mlp.Wi.weight", np.concatenate(inner)),
    ("model.layers.1.mlp.Wo.weight", values[f"{layer}/output/dense/kernel"].T),
    ("model.layers.2.attn_norm.weight",
     values[f"{layer}/output/LayerNorm/gamma"]),
    ("model.final_norm.weight",
     values["bert/encoder/layer_3/output/LayerNorm/gamma"]),
    ("head.norm.weight", values["cls/predictions/transform/LayerNorm/gamma"]),
    ("decoder.bias", values["cls/predictions/output_bias"]),
  ):  # fmt: skip
    np.testing.assert_array_equal(tensors[name], want, err_msg=name)
  assert "model.layers.0.attn_norm.weight" not in tensors
  assert "decoder.weight" not in tensors
  convert(tmp_path / "b", tmp_path / "c" / "m")
  assert_same(read(tmp_path / "c" / "m"), values)
  # A Wqkv of another size, one that is missing, and a tied one that differs.
  fused = "model.layers.1.attn.Wqkv.weight"
  for name, value, message in (
    (fused, np.ones([95, 32]), f"in {fused} is of shape"),
    (fused, np.ones([]), f"in {fused} is of shape"),
    (fused, None, f"encoder lacks {fused}"),
    ("decoder.weight", np.ones([100, 32]), "decoder.weight is not model.emb"),
    ("model.layers.9.mlp_norm.weight", np.ones(32), "no weight of a Modern"),
  ):
    changed = {n: tensor for n, tensor in tensors.items() if n != name}
    if value is not None:
      changed[name] = value.astype(np.float32)
    safetensors.numpy.save_file(changed, path)
    with pytest.raises(UserError, match=message):
      checkpoint_weights.open_checkpoint(str(tmp_path / "b"))


@pytest.mark.parametrize(
  "part, of_task",
  [
    (weights.CLASSIFIER, "classifier"),
    (weights.QUESTIONS, "squad"),
    (weights.TOKEN_CLASSIFIER, "ner"),
  ],
)
def test_the_architecture_says_whose_classifier_it_is(tmp_path, part, of_task):
  """Heads of answers, labels and tokens have one name in ModernBERT."""
  parts = [weights.ENCODER, weights.TRANSFORM, part]
  values = random_values(parts, keys=MODERN)
  prefix = write_checkpoint(tmp_path / "a", values, **MODERN)
  convert(prefix, tmp_path / "b")
  config = runs.read_json(tmp_path / "b", "config.json")
  (kind,) = config["architectures"]
  assert kind.startswith("ModernBertFor")
  tensors = safetensors.numpy.load_file(tmp_path / "b" / "model.safetensors")
  assert {"classifier.weight", "classifier.bias"} <= {*tensors}
  (tmp_path / "b" / "task.json").unlink()
  again = checkpoint_weights.open_checkpoint(str(tmp_path / "b"))
  assert {*again.shapes} == {*values}
  task, _ = huggingface_folder.read_task(str(tmp_path / "b"), {})
  assert task["task"] == of_task


def test_a_pooler_beside_a_robertas_classifier_is_left_out(tmp_path):
  """Published ones have it, and transformers reads it no more than we do."""
  parts = [weights.ENCODER, weights.POOLER, weights.CLASSIFIER]
  values = random_values(parts, keys=ROBERTA)
  prefix = write_checkpoint(tmp_path / "a", values, **ROBERTA)
  convert(prefix, tmp_path / "b")
  path = tmp_path / "b" / "model.safetensors"
  tensors = safetensors.numpy.load_file(path)
  for role in ("weight", "bias"):
    classifier = tensors[f"classifier.dense.{role}"]
    tensors[f"roberta.pooler.dense.{role}"] = classifier + 1.0
  safetensors.numpy.save_file(tensors, path)
  again = checkpoint_weights.open_checkpoint(str(tmp_path / "b"))
  assert {*again.shapes} == {*values}
  for name in values:
    np.testing.assert_array_equal(again[name], values[name])
  assert any("roberta.pooler.dense.bias" in line for line in again.left_out)


@pytest.mark.parametrize("name", ["modernbert", "roberta", "eurobert"])
def test_inputs_of_a_model_without_segments(tmp_path, letters, name):
  keys = {**MODELS[name], "type_vocab_size": int(name == "roberta")}
  values = random_values([weights.ENCODER], keys=keys)
  prefix = write_checkpoint(tmp_path / "a", values, **keys)
  said = convert(prefix, tmp_path / "b", vocab_file=letters)
  assert ("    pooler" in said) == (name == "roberta")
  config = runs.read_json(tmp_path / "b", "tokenizer_config.json")
  assert config["model_input_names"] == ["input_ids", "attention_mask"]
  content = runs.read_json(tmp_path / "b", "config.json")
  ids = [content[f"{key}_token_id"] for key in ("pad", "bos", "eos")]
  assert ids == [0, 2, 3]
  card = (tmp_path / "b" / "README.md").read_text()
  assert f'tags: ["{name}", "perseus-bert"]' in card
  source = model_source.find(str(tmp_path / "b"))
  assert not source.bert.differences(BertConfig.from_dict(keys))


def test_a_folder_has_the_segments_that_its_tokenizer_gives(tmp_path):
  keys = {**ROBERTA, "type_vocab_size": 2}
  parts = [weights.ENCODER, weights.POOLER, weights.CLASSIFIER]
  values, folder = random_values(parts, keys=keys), tmp_path / "b"
  convert(write_checkpoint(tmp_path / "a", values, **keys), folder)
  (folder / "task.json").unlink(missing_ok=True)
  tokenizer_folders.write(folder / "theirs", "roberta")
  for file in (folder / "theirs").glob("tokenizer*"):
    shutil.copy(file, folder)
  task, _ = huggingface_folder.read_task(str(folder), {})
  assert task["segment_ids"] is False
  encoder = HuggingFaceEncoder(str(folder / "tokenizer.json"))
  tokenizer_files.write_tokenizer(str(folder), encoder, 64)
  task, _ = huggingface_folder.read_task(str(folder), {})
  assert "segment_ids" not in task
  # transformers gives no ids of segments to a model whose files do not ask.
  path = folder / "tokenizer_config.json"
  names = {"model_input_names": ["input_ids", "attention_mask"]}
  path.write_text(json.dumps(json.loads(path.read_text()) | names))
  task, _ = huggingface_folder.read_task(str(folder), {})
  assert task["segment_ids"] is False


def test_roformer_turns_the_neighbours_that_are_halves_here():
  """Row 2i of a head there is its column i here, 2i + 1 is i + D / 2."""
  parts = [weights.ENCODER, weights.MASKED_LM]
  values = random_values(parts, 0, keys=ROFORMER)
  config = BertConfig.from_dict(ROFORMER)
  tensors = huggingface_weights.to_huggingface(values, config, "here")
  size, scope = config.head_size, "layer_0/attention/self"
  for name, turned in (("query", True), ("key", True), ("value", False)):
    ours = values[f"bert/encoder/{scope}/{name}/kernel"].T
    there = f"roformer.encoder.layer.0.attention.self.{name}.weight"
    for row, theirs in enumerate(tensors[there]):
      head, place = divmod(row, size)
      column = place // 2 + place % 2 * size // 2 if turned else place
      np.testing.assert_array_equal(theirs, ours[head * size + column])
  sines = tensors["roformer.encoder.embed_positions.weight"]
  angle = 3 / 10000 ** (2 / size)  # of position 3 and pair 1
  want = [np.sin(angle), np.cos(angle)]
  np.testing.assert_allclose(sines[3, [1, 1 + size // 2]], want, rtol=1e-6)
