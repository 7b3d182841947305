"""DeepSpeed-style JSON: the recipe, every refusal, flags that win over it."""

import functools
import json
import os

import numpy as np
import pytest
import runs
from samples import write_config

from common.errors import UserError
from common.settings import settings_of
from config import lr_schedule, precision
from config.deepspeed_json import flags_of as flags_of_settings
from config.pretraining import PretrainingConfig

flags_of = functools.partial(flags_of_settings, PretrainingConfig)
RECIPES = os.path.join(runs.ROOT, "configs", "large_batch_phase{}.json")


def test_the_published_recipe_hand_checked():
  """The settings of DeepSpeed's own recipe."""
  one = flags_of(RECIPES.format(1))
  assert one == {
    "global_batch_size": 65536, "train_batch_size": 64, "clip_norm": 1.0,
    "optimizer": "lamb", "learning_rate": 0.011, "weight_decay_rate": 0.01,
    "bias_correction": False, "max_trust_ratio": 0.3, "min_trust_ratio": 0.01,
    "lr_schedule": "warmup_exp_decay_exp", "num_train_steps": 7500,
    "num_warmup_steps": 150, "lr_decay_rate": 0.9, "lr_decay_steps": 250,
    "lr_offset": 0.001, "precision": "fp16", "loss_scale": 0,
  }  # fmt: skip
  two = flags_of(RECIPES.format(2))
  differs = {k: v for k, v in two.items() if one.get(k) != v}
  assert differs == {
    "global_batch_size": 32768, "train_batch_size": 8, "learning_rate": 0.002,
    "lr_decay_steps": 150, "lr_offset": 0.0, "rewarmup": True,
  }  # fmt: skip
  rate = lr_schedule.Schedule(
    0.011, 7500, 150, "warmup_exp_decay_exp", None, 0.9, 250, 0.001
  )
  np.testing.assert_allclose(rate(150), 0.012)


def test_recipes_by_budget_are_read():
  names = ("laptop", "two_cores", "one_gpu")
  folder = os.path.dirname(RECIPES)
  found = [flags_of(os.path.join(folder, f"{name}.json")) for name in names]
  plans = [(f["global_batch_size"], f["num_train_steps"]) for f in found]
  assert plans == [(96, 2_000), (46, 100_000), (256, 1_000_000)]
  assert [f["precision"] for f in found[2:]] == ["bf16"]


def test_a_dry_run_plans_for_ranks_that_are_not_there(tmp_path):
  config = write_config(tmp_path / "config.json", num_hidden_layers=1)
  process = runs.launch(
    [
      os.path.join(runs.ROOT, "run_pretraining.py"), "--dry_run",
      "--dry_run_ranks=64", f"--bert_config_file={config}", "--xla=off",
      f"--config_json={RECIPES.format(1)}", "--max_seq_length=32",
      "--max_predictions_per_seq=5",
    ]
  )  # fmt: skip
  assert process.returncode == 0, process.stderr[-2000:]
  said = process.stderr
  for words in (
    "64 ranks x 16 micro-batches",
    "7,500 updates (150 of warm-up)",
    "fits; with 10% left free, the largest is about --train_batch_size=",
    " s an update, ",
  ):
    assert words in said
  assert "nan" not in said


def written(tmp_path, fields):
  path = tmp_path / "ds.json"
  path.write_text(json.dumps(fields))
  return str(path)


BASE = {"train_batch_size": 64, "optimizer": {"type": "Adam"}}


def adam(**params):
  return {"optimizer": {"type": "Adam", "params": params}}


@pytest.mark.parametrize(
  "change, words",
  [
    ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage is not hon"),
    ({"amp": {"opt_level": "O1"}}, "amp.opt_level is not honoured here"),
    ({"train_batch_size": True}, "train_batch_size is True, not an integer"),
    ({"optimizer": ["Adam"]}, "optimizer is not honoured here"),
    (
      {"optimizer": {"type": "SGD"}},
      "is 'SGD', not Adam or AdamW or Lamb",
    ),
    ({"optimizer": {"type": "Adam", "legacy": 1}}, "optimizer.legacy is not"),
    (adam(max_coeff=1), "optimizer.params.max_coeff is not honoured here"),
    (adam(betas=[0.9]), r"params.betas is \[0.9\], not a list of two numbers"),
    (
      {"gradient_clipping": 1.0, **adam(max_grad_norm=2.0)},
      "gradient_clipping is 1.0, but optimizer.params.max_grad_norm is 2.0",
    ),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler.type is 'WarmupLR'"),
    (
      {"scheduler": {"type": "linear", "params": {"warmup_proportion": 0.1}}},
      "warmup_proportion is 0.1: it must be in .* needs total_num_steps",
    ),
    (
      {
        "scheduler": {
          "type": "linear",
          "params": {
            "total_num_steps": 9,
            "warmup_num_steps": 1,
            "warmup_proportion": 0.1,
          },
        }
      },
      "warmup_proportion is 0.1: .* and no warmup_num_steps",
    ),
    ({"fp16": {"enabled": 1}}, "fp16.enabled is 1, not true or false"),
    (
      {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
      "bf16.enabled is True, but fp16.enabled is 'fp16'",
    ),
  ],
)
def test_a_field_that_is_not_honoured_is_named(tmp_path, change, words):
  with pytest.raises(UserError, match=f"ds.json: .*{words}"):
    flags_of(written(tmp_path, {**BASE, **change}))


def test_steps_count_the_batches_of_stages(tmp_path):
  each = [{"num_train_steps": 4, "input_file": "a", "global_batch_size": 8}]
  (tmp_path / "stages.json").write_text(json.dumps(each))
  fields = {"train_micro_batch_size_per_gpu": 4}
  path = written(tmp_path, fields)
  values, _ = PretrainingConfig.in_files(
    {"stages": str(tmp_path / "stages.json"), "config_json": path}
  )
  assert values["global_batch_size"] == 8


def test_each_field_of_a_setting_has_its_kind(tmp_path):
  for one in settings_of(PretrainingConfig):
    for field in one.json:
      fields = "wrong"
      for key in reversed(field.split(".")):
        fields = {key: fields}
      fields.setdefault("optimizer", {})["type"] = "Lamb"
      with pytest.raises(UserError, match=f"{field} is 'wrong', not "):
        flags_of(written(tmp_path, fields))


# Steps without a batch would be divided by ranks; a flag may give it.
SCHEDULED = (
  '{"scheduler": {"type": "linear", "params": {"total_num_steps": 9}}}'
)


@pytest.mark.parametrize(
  "text, words",
  [
    ("{", "Expecting property name"),
    ('{"train_micro_batch_size_per_gpu": 8}', "train_batch_size is missing"),
    (SCHEDULED, "missing beside .*total_num_steps"),
    # Numbers that cannot be.
    ('{"fp16": {"enabled": true, "initial_scale_power": 1e5}}', "scale_power"),
    ('{"gradient_clipping": 1e999}', "gradient_clipping is inf, not a number"),
    ('{"gradient_clipping": 1%s}' % ("0" * 400), "gradient_clipping is 10"),
    ('{"train_batch_size": 1%s}' % ("0" * 400), "train_batch_size is 10"),
    ('{"optimizer": {"type": ["Adam"]}}', "optimizer.type is"),
    (
      '{"optimizer": {"type": "Lamb", "params": {"betas": [0.9, 1e999]}}}',
      "betas is",
    ),
  ],
)
def test_text_that_cannot_be(tmp_path, text, words):
  path = tmp_path / "ds.json"
  path.write_text(text)
  with pytest.raises(UserError, match=f"ds.json: .*{words}"):
    flags_of(str(path))
  if text == SCHEDULED:
    found = flags_of(str(path), {"global_batch_size": 64})
    assert found == {"lr_schedule": "linear", "num_train_steps": 9}


# The command line, and the fields that it leaves without meaning.
@pytest.mark.parametrize(
  "given, dropped, changed",
  [
    ({}, "", {}),
    ({"precision": "fp16"}, "precision", {}),
    ({"precision": "bf16"}, "precision loss_scale min_loss_scale", {}),
    ({"precision": "fp32", "fp16_allreduce": True}, "precision", {}),
    ({"precision": "bf16", "precision_policy": ["gelu=fp16"]}, "precision", {}),
    (
      {"precision_policy": [f"{p}=bf16" for p in precision.PARTS]},
      "loss_scale min_loss_scale", {},
    ),
    ({"lr_schedule": "cosine"}, "lr_schedule lr_power", {}),
    ({"lr_schedule": "poly"}, "lr_schedule", {}),
    ({"num_train_steps": 100}, "num_train_steps", {"num_warmup_steps": 20}),
    (
      {"num_train_steps": 100, "num_warmup_steps": 3},
      "num_train_steps num_warmup_steps", {},
    ),
    (
      {"train_batch_size": 4}, "train_batch_size num_accumulation_steps", {},
    ),
    (
      {"global_batch_size": 8}, "global_batch_size num_accumulation_steps", {},
    ),
    ({"optimizer": "adamw"}, "optimizer", {}),
  ],
)  # fmt: skip
def test_what_a_winning_flag_leaves_without_meaning(
  tmp_path, given, dropped, changed
):
  schedule = {"total_num_steps": 50, "warmup_proportion": 0.2, "degree": 2.0}
  fields = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
    "scheduler": {"type": "poly", "params": schedule},
    "fp16": {"enabled": True, "loss_scale": 0, "min_loss_scale": 2},
  }
  path = written(tmp_path, fields)
  alone = flags_of(path)
  left = alone.keys() - {*dropped.split()}
  assert len(alone) == 12 and alone["num_warmup_steps"] == 10
  assert flags_of(path, given) == {n: alone[n] for n in left} | changed


OFF = (
  {"prescale_gradients": False},
  {"wall_clock_breakdown": False, "dump_state": 0, "zero_optimization": {}},
  {"zero_optimization": {"stage": 0, "overlap_comm": True}},
  {"fp16": {"enabled": False, "loss_scale": 0, "auto_cast": True}},
  {"amp": {"enabled": False, "opt_level": "O1"}, "bf16": {}},
  {"flops_profiler": {"enabled": False, "profile_step": 5}, "sparse": None},
  {"activation_checkpointing": {"partition_activations": False, "n": None}},
  {"gradient_clipping": None, "scheduler": None, "fp16": None},
  adam(torch_adam=False),
  {"optimizer": {"type": "Adam", "legacy_fusion": False, "params": None}},
)


@pytest.mark.parametrize("fields", OFF)
def test_a_field_that_is_off_asks_for_nothing(tmp_path, fields):
  alone = flags_of(written(tmp_path, BASE))
  assert flags_of(written(tmp_path, {**BASE, **fields})) == alone


def test_fp16_fields_and_what_is_off(tmp_path):
  fp16 = {
    "enabled": True, "initial_scale_power": 12, "loss_scale_window": 500,
    "hysteresis": 2, "min_loss_scale": 2,
  }  # fmt: skip
  path = written(tmp_path, {"fp16": fp16, "bf16": {"enabled": False}})
  assert flags_of(path) == {
    "precision": "fp16", "initial_loss_scale": 4096.0, "loss_scale_window": 500,
    "loss_scale_hysteresis": 2, "min_loss_scale": 2,
  }  # fmt: skip


@pytest.mark.slow
def test_the_command_line_wins(tiny_run, tmp_path):
  fields = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 12,
    "optimizer": {"type": "Lamb", "params": {"lr": 0.5}},
    "scheduler": {"type": "constant", "params": {"total_num_steps": 3}},
  }
  run, steps = tmp_path / "run", "--num_train_steps=20"
  words = [word for word in runs.arguments(tiny_run, run) if word != steps]
  more = [f"--config_json={written(tmp_path, fields)}", "--num_warmup_steps=0"]
  process = runs.launch([*words, *more])
  assert process.returncode == 0, process.stderr[-2000:]
  np.testing.assert_allclose(
    runs.metrics(run, "learning_rate"), [0.001] * 3, rtol=1e-6
  )
  flags = runs.read_json(run, "run.json")["runs"][-1]["flags"]
  assert flags["optimizer"]["optimizer"] == "lamb"
