"""Each command of the product that a page names runs, with tiny settings.

`test_docs.py` runs README's blocks as they are; `test_commands.py` has the
benchmarks.
"""

import json
import re
import shlex

import pytest
import runs
import test_docs

_MODEL = (
  "--init_checkpoint=pretrain --max_seq_length=32 --train_batch_size=1 "
  "--do_train --do_eval"
)
# In this order, in one folder: a command uses what those before it made.
COMMANDS = [
  "-m tools.flags_reference",
  "-m tools.prepare_corpus --corpus=text.txt --output_dir=corpus",
  "-m tools.train_tokenizer --input_file=corpus/train.txt "
  "--output_file=vocab.txt --vocab_size=200",
  "create_pretraining_data.py --input_file=corpus/train.txt "
  "--output_file=records/train.tfrecord --vocab_file=vocab.txt "
  "--max_seq_length=32 --max_predictions_per_seq=4",
  "-m tools.inspect_records records/train.tfrecord",
  "run_pretraining.py --do_train --bert_config_file=tiny --output_dir=pretrain "
  "--input_file=records/train.tfrecord --train_batch_size=4 --num_train_steps=2"
  " --num_warmup_steps=1",
  "run_pretraining.py --dry_run --dry_run_ranks=1 --bert_config_file=tiny "
  "--input_file=records/train.tfrecord --train_batch_size=4 --num_train_steps=2"
  " --num_warmup_steps=1",
  "-m tools.plot_metrics --output=curve.png pretrain",
  f"run_classifier.py {_MODEL} --train_file=a.tsv --eval_file=a.tsv "
  "--output_dir=classifier --num_train_epochs=1",
  f"run_ner.py {_MODEL} --train_file=ner.txt --eval_file=ner.txt "
  "--output_dir=ner --num_train_epochs=1",
  "run_squad.py --init_checkpoint=pretrain --max_seq_length=32 "
  "--train_batch_size=1 --do_train "
  "--do_predict --train_file=squad.json --predict_file=squad.json "
  "--max_query_length=8 --doc_stride=8 --output_dir=squad --num_train_epochs=1",
  "run_embedder.py --do_train --do_eval --init_checkpoint=pretrain "
  "--train_file=pairs.jsonl --eval_file=pairs.jsonl --max_seq_length=32 "
  "--text_column=sentence_good --text_pair_column=sentence_bad "
  "--train_batch_size=1 --output_dir=embedder --num_train_epochs=1",
  "-m tools.run_tasks pretrain --tasks=tasks.json --seeds=1 --output_dir=tasks "
  "-- --num_train_epochs=1 --max_seq_length=32 --train_batch_size=1",
  "predict.py pretrain 'the [MASK] sleeps .'",
  "predict.py squad --question='who sleeps ?' --context='the dog sleeps .'",
  "convert_checkpoint.py pretrain --output=hugging_face",
  "convert_checkpoint.py classifier --to=saved_model --output=served/1",
  "-m tools.evaluate_grammar pretrain --pairs=pairs.jsonl",
  "-m tools.embed pretrain --input=text.txt --output=v.npy",
  "-m tools.search pretrain --documents=text.txt --vectors=v.npy --query=dog",
  "-m tools.mine_negatives pretrain --input=pairs.jsonl --corpus=text.txt "
  "--anchor_column=sentence_good --positive_column=sentence_bad "
  "--relative_margin=0 --output=mined.jsonl",
]
# What starts these has tests of its own: make pretrain, services.
ELSEWHERE = {"tools.quickstart", "training.services"}


def test_each_command_that_a_page_names_is_run_here():
  named = set()
  for page in test_docs.CURRENT:
    text = " ".join(test_docs.read(page).split())
    named |= set(re.findall(r"python -m ((?:tools|training)\.\w+)", text))
    named |= set(re.findall(r"python (\w+\.py)", text))
  run = {shlex.split(command.removeprefix("-m "))[0] for command in COMMANDS}
  assert len(named) > 12
  assert named - run - ELSEWHERE == set()


def write_inputs(folder):
  """Text, and the files of each task, of the same few sentences."""
  lines = []
  for noun in ("dog", "king", "teacher", "keeper"):
    for verb in ("sleeps", "sings", "walks", "reads"):
      lines.append(f"The {noun} {verb} in the old mill .")
  # Documents of four sentences.
  documents = ["\n".join(lines[i : i + 4]) for i in range(0, 16, 4)] * 8
  (folder / "text.txt").write_text("\n\n".join(documents))
  rows = [f"{line}\t{i % 2}" for i, line in enumerate(lines)]
  (folder / "a.tsv").write_text("\n".join(["sentence\tlabel", *rows, ""]))
  tokens = [f"{word} {'B-X' if word == 'mill' else 'O'}"
            for word in lines[0].split()]  # fmt: skip
  (folder / "ner.txt").write_text("\n".join([*tokens, ""]) + "\n")
  answer = {"text": "old mill", "answer_start": lines[0].index("old mill")}
  question = {
    "id": "1",
    "question": "Where does it sleep?",
    "answers": [answer],
  }
  paragraph = {"context": lines[0], "qas": [question]}
  squad = {"version": "1.1", "data": [{"paragraphs": [paragraph]}]}
  (folder / "squad.json").write_text(json.dumps(squad))
  task = {"train_file": "a.tsv", "eval_file": "a.tsv"}
  (folder / "tasks.json").write_text(json.dumps({"task": task}))
  pair = {
    "sentence_good": lines[0],
    "sentence_bad": lines[0].replace("sleeps", "mill"), "UID": "x",
    "field": "y", "linguistics_term": "z",
  }  # fmt: skip
  (folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n")


@pytest.mark.slow
def test_the_commands_run(tmp_path, monkeypatch):
  write_inputs(tmp_path)
  monkeypatch.chdir(tmp_path)
  for command in COMMANDS:
    words = shlex.split(command)
    if words[0] != "-m":
      words[0] = f"{runs.ROOT}/{words[0]}"
    process = runs.launch(words)
    assert process.returncode == 0, (command, process.stderr[-2000:])
