"""Text to pre-training records: masked LM and next-sentence examples.

  python create_pretraining_data.py --input_file='corpus/train*.txt' \\
      --output_file=records/train.tfrecord --vocab_file=vocab.txt
  horovodrun -np 4 -H host1:1,host2:1,host3:1,host4:1 \\
      python create_pretraining_data.py ...

writes records/train-00000-of-00004.tfrecord ... with an index beside each, and
records/train.manifest.json. Flags, instances and masks are google/bert's.

The bytes do not depend on the number of workers or machines, and memory does
not depend on the size of the text: a document longer than a block of records is
cut into several. A stop leaves the finished work in records/train.unfinished,
from which the same command resumes.
"""

import dataclasses
import signal
import sys

from absl import flags

from common import errors
from data import creation, work_dir


def report(summary: creation.Summary) -> str:
  """The closing table."""
  c, manifest = summary, summary.manifest
  num_records = sum(info.records for info in manifest.files)
  capacity = num_records * manifest.max_seq_length
  is_static = manifest.masking == "static"
  masked = f"{c['masked_tokens']:,}" if is_static else "drawn in training"
  total = sum(summary.seconds.values())
  rows = [
    ("documents", f"{c['documents']:,}"),
    ("sentences", f"{c['sentences']:,}"),
    ("tokens", f"{c['tokens']:,}"),
    ("unknown tokens", f"{c['unknown_tokens'] / c['tokens']:.3%}"),
    ("unigram entropy", f"{c['unigram_entropy']:.3f} nats"),
    ("examples", f"{c['examples']:,}"),
    ("records", f"{num_records:,} of {manifest.packing_factor:.2f} examples"),
    ("random next", f"{c['random_next'] / c['examples']:.1%}"),
    ("masked tokens", masked),
    ("fill", f"{c['real_tokens'] / capacity:.1%} of tokens are no padding"),
    *((name, f"{s:.1f} s") for name, s in summary.seconds.items()),
    ("speed", f"{c['text_bytes'] / 1e6 / total:.2f} MB of text/s"),
    ("files", f"{len(manifest.files)}, {manifest.files[0].name} ..."),
    ("manifest", summary.manifest_path),
  ]
  if c["cut_documents"]:
    note = f"{c['cut_documents']:,}, because they are longer than a block"
    rows.append(("cut documents", note))
  if summary.kept:
    rows.append(("kept", summary.kept))
  if not manifest.settings["prose"] and c["tokens"] > 80 * c["sentences"]:
    rows.append(
      (
        "note",
        f"{c['tokens'] / c['sentences']:.0f} tokens a sentence: if a line is a "
        "paragraph, give --prose=en (or your language)",
      )
    )
  return "\n".join(f"{name:<16} {value}" for name, value in rows)


def define_flags() -> None:
  flags.DEFINE_string(
    "input_file",
    None,
    "Text, one sentence a line and a blank line between documents, or .jsonl "
    "with a document a line; plain, .gz or .zst: names and globs, "
    "comma-separated. The end of a file does not end a document.",
    required=True,
  )
  flags.DEFINE_string(
    "output_file",
    None,
    "Record file to write. With several shards NAME.EXT becomes "
    "NAME-00000-of-00004.EXT ...; a comma-separated list gives exact names. "
    "Data sets in one folder must differ in NAME.",
    required=True,
  )
  flags.DEFINE_string(
    "prose",
    "",
    "Lines are prose in this language (ISO 639-1 code: en, zh, ...), to be "
    "split into sentences. Empty: a line is a sentence.",
  )
  flags.DEFINE_string(
    "text_field", "text", "The field of a .jsonl record that holds its text."
  )
  flags.DEFINE_string(
    "encoding",
    "utf-8",
    "The text's encoding, any of Python's. Bytes that are not in it are an "
    "error.",
  )
  flags.DEFINE_string("vocab_file", None, "WordPiece vocabulary (vocab.txt).")
  flags.DEFINE_string(
    "spm_model_file", None, "SentencePiece model, instead of --vocab_file."
  )
  flags.DEFINE_bool(
    "do_lower_case",
    True,
    "Whether to lower-case the text: True for an uncased vocabulary.",
  )
  flags.DEFINE_bool(
    "do_whole_word_mask",
    False,
    "Mask whole words instead of single pieces; Chinese words are jieba's.",
  )
  flags.DEFINE_integer("max_seq_length", 128, "Tokens of a record at most.")
  flags.DEFINE_integer(
    "max_predictions_per_seq", 20, "Masked tokens of a record at most."
  )
  flags.DEFINE_integer(
    "examples_per_record",
    1,
    "Examples that share a record at most, so that training spends no time on "
    "padding; 1: not packed, as google/bert's scripts read it.",
  )
  flags.DEFINE_integer("random_seed", 12345, "Decides all that is random.")
  flags.DEFINE_integer(
    "dupe_factor",
    None,
    "Copies of each document, each cut and masked in its own way. Default: 10, "
    "or 1 with --dynamic_masks.",
  )
  flags.DEFINE_float("masked_lm_prob", 0.15, "Share of tokens to mask.")
  flags.DEFINE_float(
    "short_seq_prob", 0.1, "Share of documents cut into shorter examples."
  )
  flags.DEFINE_bool(
    "dynamic_masks",
    False,
    "Leave the masks to training, which draws new ones each epoch.",
  )
  flags.DEFINE_integer(
    "num_shards", None, "Files to write. Default: one for about 16 MB."
  )
  flags.DEFINE_integer(
    "num_workers",
    None,
    "Processes on each machine. Default: all cores. The records are the same "
    "for any number.",
  )


def _stop(signal_number, _) -> None:
  # As an exception, so that workers end too.
  sys.exit(f"create_pretraining_data.py: stopped by signal {signal_number}")


def main(_) -> None:
  signal.signal(signal.SIGTERM, _stop)
  signal.signal(signal.SIGINT, _stop)
  names = [field.name for field in dataclasses.fields(creation.Settings)]
  settings = creation.Settings(
    **{name: flags.FLAGS[name].value for name in names}
  )
  summary = creation.create(settings, work_dir.ranks_of_environment())
  if summary:
    print(report(summary))


if __name__ == "__main__":
  define_flags()
  errors.run_main(main)
