"""What a folder has fixed: each row of the table refuses, by its own words."""

import dataclasses

import finetuning_runs
import pytest
import runs
import samples

from checkpoints import agreement, run_start
from checkpoints.agreement import FIXED, OTHERS
from checkpoints.description import Description
from common.errors import UserError
from config.pretraining import PretrainingConfig
from finetuning import classification, embedding, ner, squad
from model.tasks import CLASSIFIER, EMBEDDER, NER, PRETRAINING, SQUAD
from records import record_order
from training import plans, resume

CONFIGS = (
  PretrainingConfig, classification.ClassifierConfig, squad.SquadConfig,
  ner.NerConfig, embedding.EmbedderConfig,
)  # fmt: skip
VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK] w1 w2 good bad".split()


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
  """Kind of model -> its facts, from what writes and reads them in runs."""
  folder = tmp_path_factory.mktemp("facts")
  (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
  vocabulary = str(folder / "vocab.txt")
  tokenizer = {
    "kind": "wordpiece", "file": "vocab.txt", "sha256": "0" * 64,
    "vocab_size": 9, "do_lower_case": True, "mask_id": 4,
  }  # fmt: skip
  config = runs.config(
    (samples.write_config(folder / "tiny.json"), "a"),
    folder, objective="mlm", stages=({"input_file": "a"},),
    global_batch_size=24, num_train_steps=100_000,
  )  # fmt: skip
  data = {"files": ["a"], "records": 7, "contents": "b", "tokenizer": tokenizer}
  known = {
    PRETRAINING: {
      **agreement.of_start(config.as_dict(), {"ranks": 1}, data),
      **resume.order_facts(record_order.Order(7, 1, 2)),
      **run_start.begun_stages(config.stages, 0),
      "task": PRETRAINING,
    }
  }
  for kind, task in (
    (CLASSIFIER, "choose"), (SQUAD, "answer"), (NER, "label"),
    (EMBEDDER, "embed"),
  ):  # fmt: skip
    make = finetuning_runs.maker(task, folder, vocabulary)
    content = make(folder / task).task_content()
    known[kind] = {
      **agreement.of_vocabulary_files({"vocab_file": vocabulary}),
      **agreement.of_task(content),
    }
  return known


@pytest.mark.parametrize("name", sorted(FIXED.keys() - {"lr_factor"}))
def test_each_fixed_fact_refuses_another_value(facts, name):
  """A name that is mistyped, here or where facts are made, has no fact."""
  row, refused = FIXED[name], 0
  for kind, known in facts.items():
    if name not in known or kind not in row.kinds:
      continue
    was = {**known, name: "former"}
    if name == "task":
      was["task"] = NER if kind == SQUAD else SQUAD
    with pytest.raises(UserError) as raised:
      agreement.agree(was, known, "FOLDER", (row.scope,))
    text = str(raised.value)
    assert text.startswith(f"FOLDER: {agreement.title(name)} ")
    assert text.endswith(row.remedy)
    agreement.agree(was, known, "FOLDER", ())  # in another scope it is free
    refused += 1
  assert refused, f"no kind of model has the fact {name}"


def test_the_factor_of_the_learning_rate_is_kept(tiny_run, tmp_path):
  config = runs.config(tiny_run, tmp_path, lr_scaling="linear")
  plan = plans.of_run(config, None, 2)
  start = {"flags": config.as_dict(), "plan": {"ranks": 1}, "data": None}
  before = Description("FOLDER", (start,), {})
  with pytest.raises(UserError) as raised:
    resume.check_run(config, plan, before)
  assert str(raised.value) == (
    "FOLDER: factor of --lr_scaling 1.0 -> 2.0: to resume it as it was give "
    "--lr_scaling=none --learning_rate=0.001"
  )


def test_all_facts_have_a_name_for_people(facts):
  """Those that are no flags stand in `OTHERS`, and each of these is a fact."""
  made = {"lr_factor", "updates", "warmup_updates"}.union(*facts.values())
  assert OTHERS.keys() <= made
  fields = set()
  for config in CONFIGS:
    fields |= {field.name for field in fields_of(config)}
  settings = {name for name in made if not name.startswith("bert.")}
  assert settings - OTHERS.keys() <= fields


def fields_of(kind):
  """The settings of a kind of run, those of its parts, too."""
  for field in dataclasses.fields(kind):
    yield field
    if dataclasses.is_dataclass(field.type):
      yield from fields_of(field.type)
