"""Times create_pretraining_data.py against google/bert's procedure.

  python -m benchmarks.data --input_file=train.txt --vocab_file=vocab.txt

The reference is google/bert's procedure in plain Python, as its own script is:
one process, a token at a time, documents in memory, tf.train.Example. It gets
the first --reference_mb of the text, since it takes seconds for each. So does
google/bert's own script, if --google_bert says where there is a checkout. In
turns, one JSON line a case with seconds per MB of text (medians), and the
ratios; starting Python is part of all but the reference.
"""

import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

import tokenization
from common.tensorflow_v1 import tf
from training import next_steps, train_loop

FLAGS = tf.flags.FLAGS
_OURS = "create_pretraining_data.py"
_SPECIAL = 3  # [CLS], [SEP], [SEP]


def define_flags() -> None:
  flags = tf.flags
  flags.DEFINE_string("input_file", None, "Text.", required=True)
  flags.DEFINE_string("vocab_file", None, "Vocabulary.", required=True)
  flags.DEFINE_integer("max_seq_length", 128, "Of an example.")
  flags.DEFINE_integer("max_predictions_per_seq", 20, "Of an example.")
  flags.DEFINE_integer("dupe_factor", 5, "Copies with static masks.")
  flags.DEFINE_float("reference_mb", 2.0, "Text for the reference.")
  flags.DEFINE_string(
    "google_bert", None, "Folder of a google/bert checkout to time, too."
  )
  flags.DEFINE_integer("rounds", 3, "Of each case, in turns.", lower_bound=1)


class Reference:
  """google/bert's procedure, a token at a time."""

  def __init__(self, vocab_file: str, length: int, predictions: int):
    self._tokenizer = tokenization.FullTokenizer(vocab_file)
    self._words = list(self._tokenizer.vocab)
    self._length, self._predictions = length, predictions
    self._random = random.Random(12345)

  def create(self, text: str, output: str, copies: int) -> int:
    """Writes the records of a text; returns their number."""
    documents = [[]]
    with open(text, encoding="utf-8") as f:
      for line in f:
        tokens = self._tokenizer.tokenize(line.strip())
        if not line.strip():
          documents.append([])
        elif tokens:
          documents[-1].append(tokens)
    documents = [d for d in documents if d]
    self._random.shuffle(documents)
    examples = []
    for _ in range(copies):
      for number in range(len(documents)):
        examples.extend(self._examples(documents, number))
    self._random.shuffle(examples)
    with tf.python_io.TFRecordWriter(output) as writer:
      for example in examples:
        writer.write(self._serialized(*example))
    return len(examples)

  def _examples(self, documents, number):
    """(tokens, segments, is_random, masked) of one copy of a document."""
    rng, room = self._random, self._length - _SPECIAL
    target = rng.randint(2, room) if rng.random() < 0.1 else room
    document, chunk, i = documents[number], [], 0
    while i < len(document):
      chunk.append(document[i])
      i += 1
      if i < len(document) and sum(map(len, chunk)) < target:
        continue
      cut = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
      first = [token for sentence in chunk[:cut] for token in sentence]
      is_random = len(chunk) == 1 or rng.random() < 0.5
      if is_random:
        second = self._elsewhere(documents, number, target - len(first))
        i -= len(chunk) - cut
      else:
        second = [token for sentence in chunk[cut:] for token in sentence]
      while len(first) + len(second) > room:
        longer = first if len(first) > len(second) else second
        del longer[0 if rng.random() < 0.5 else -1]
      tokens = ["[CLS]", *first, "[SEP]", *second, "[SEP]"]
      segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
      yield tokens, segments, is_random, self._mask(tokens)
      chunk = []

  def _elsewhere(self, documents, number, length):
    rng, other = self._random, number
    for _ in range(10):
      other = rng.randint(0, len(documents) - 1)
      if other != number:
        break
    tokens = []
    for sentence in documents[other][
      rng.randint(0, len(documents[other]) - 1) :
    ]:
      tokens.extend(sentence)
      if len(tokens) >= length:
        break
    return tokens

  def _mask(self, tokens):
    """Masks in place; {position: what stood there}."""
    rng = self._random
    places = [i for i, t in enumerate(tokens) if t not in ("[CLS]", "[SEP]")]
    rng.shuffle(places)
    count = min(self._predictions, max(1, round(len(tokens) * 0.15)))
    masked = {}
    for place in places[:count]:
      masked[place] = tokens[place]
      if rng.random() < 0.8:
        tokens[place] = "[MASK]"
      elif rng.random() < 0.5:
        tokens[place] = rng.choice(self._words)
    return dict(sorted(masked.items()))

  def _serialized(self, tokens, segments, is_random, masked):
    ids = self._tokenizer.convert_tokens_to_ids
    fill = lambda values, n: list(values) + [0] * (n - len(values))
    n, p = self._length, self._predictions
    integers = {
      "input_ids": fill(ids(tokens), n),
      "input_mask": fill([1] * len(tokens), n),
      "segment_ids": fill(segments, n),
      "masked_lm_positions": fill(masked, p),
      "masked_lm_ids": fill(ids(list(masked.values())), p),
      "next_sentence_labels": [int(is_random)],
    }
    feature = {
      name: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
      for name, values in integers.items()
    }
    feature["masked_lm_weights"] = tf.train.Feature(
      float_list=tf.train.FloatList(value=fill([1.0] * len(masked), p))
    )
    features = tf.train.Features(feature=feature)
    return tf.train.Example(features=features).SerializeToString()


def first_part(path: str, size: float, output: str) -> None:
  """The first lines of a text, `size` bytes, whole documents."""
  with open(path, "rb") as f, open(output, "wb") as out:
    for line in f:
      out.write(line)
      if out.tell() >= size and not line.strip():
        break


def google_bert(checkout: str, folder: str) -> str:
  """google/bert's script in `folder`, on TensorFlow 2's v1 API: its path."""
  for name in ("create_pretraining_data.py", "tokenization.py"):
    with open(os.path.join(checkout, name), encoding="utf-8") as f:
      code = f.read()
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
      f.write(
        code.replace(
          "import tensorflow as tf\n", "import tensorflow.compat.v1 as tf\n"
        )
      )
  return os.path.join(folder, "create_pretraining_data.py")


def main(_) -> None:
  with tempfile.TemporaryDirectory() as folder:
    sample = os.path.join(folder, "sample.txt")
    first_part(FLAGS.input_file, FLAGS.reference_mb * 1e6, sample)
    lengths = (FLAGS.max_seq_length, FLAGS.max_predictions_per_seq)

    def create(script, text, *changes):
      command = [sys.executable, script, *changes]
      command += next_steps.given({
        "input_file": text, "vocab_file": FLAGS.vocab_file,
        "output_file": f"{folder}/records.tfrecord",
        "max_seq_length": lengths[0], "max_predictions_per_seq": lengths[1],
      })  # fmt: skip
      subprocess.run(command, check=True, capture_output=True)

    own = os.path.join(os.path.dirname(tokenization.__file__), _OURS)
    ours = functools.partial(create, own, FLAGS.input_file)
    copies = f"--dupe_factor={FLAGS.dupe_factor}"
    # name: (what to run, the text it reads)
    cases = {
      "reference, static masks": (
        lambda: Reference(FLAGS.vocab_file, *lengths).create(
          sample, os.path.join(folder, "reference.tfrecord"), FLAGS.dupe_factor
        ),
        sample,
      ),
      "static masks, 1 worker": (
        lambda: ours(copies, "--num_workers=1"),
        FLAGS.input_file,
      ),
      "static masks, all cores": (lambda: ours(copies), FLAGS.input_file),
      "dynamic masks, all cores": (
        lambda: ours("--dynamic_masks"),
        FLAGS.input_file,
      ),
    }
    if FLAGS.google_bert:
      script = google_bert(FLAGS.google_bert, folder)
      cases["google/bert, static masks"] = (
        lambda: create(script, sample, copies),
        sample,
      )
    seconds = {name: [] for name in cases}
    for _ in range(FLAGS.rounds):
      for name, (run, text) in cases.items():
        began = time.perf_counter()
        run()
        taken = time.perf_counter() - began
        seconds[name].append(taken / os.path.getsize(text) * 1e6)
  reference = statistics.median(next(iter(seconds.values())))
  for name, values in seconds.items():
    median = statistics.median(values)
    result = {
      "case": name,
      "seconds_per_mb": round(median, 4),
      "times_the_reference": round(reference / median, 1),
      "dupe_factor": 1 if "dynamic" in name else FLAGS.dupe_factor,
      "max_seq_length": lengths[0],
      "rounds": FLAGS.rounds,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
  define_flags()
  train_loop.run_main(main)
