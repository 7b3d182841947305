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

import signal
import sys

from common.settings import run_with
from data import creation, work_dir


def report(summary: creation.Summary) -> str:
  """The closing table."""
  c, manifest = summary, summary.manifest
  num_records, sentences = manifest.num_records, c["sentences"]
  capacity = num_records * manifest.max_seq_length
  is_static = manifest.masking == "static"
  masked = f"{c['masked_tokens']:,}" if is_static else "drawn in training"
  total = sum(summary.seconds.values())
  rows = [
    ("documents", f"{c['documents']:,}"),
    ("sentences", f"{sentences:,}"),
    ("tokens", f"{c['tokens']:,}"),
    ("unknown tokens", f"{c['unknown_tokens'] / c['tokens']:.3%}"),
    ("unigram entropy", f"{c['unigram_entropy']:.3f} nats"),
    ("examples", f"{c['examples']:,}"),
    ("records", f"{num_records:,} of {manifest.packing_factor:.2f} examples"),
    ("random next", f"{c['random_next'] / c['examples']:.1%}")
    if manifest.has_pairs
    else ("objective", "masked LM alone"),
    ("masked tokens", masked),
    ("fill", f"{c['real_tokens'] / capacity:.1%} of tokens are not padding"),
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
  if not manifest.settings["prose"] and c["tokens"] > 80 * sentences:
    note = f"{c['tokens'] / sentences:.0f} tokens a sentence: if a line is a "
    note += "paragraph, give --prose=en (or your language)"
    rows.append(("note", note))
  return "\n".join(f"{name:<16} {value}" for name, value in rows)


def _stop(signal_number, _) -> None:
  # As an exception, so that workers end too.
  sys.exit(f"create_pretraining_data.py: stopped by signal {signal_number}")


def main(settings: creation.Settings) -> None:
  """Makes records and prints their table."""
  signal.signal(signal.SIGTERM, _stop)
  signal.signal(signal.SIGINT, _stop)
  summary = creation.create(settings, work_dir.ranks_of_environment())
  if summary:
    print(report(summary))


if __name__ == "__main__":
  run_with(creation.Settings, main)
