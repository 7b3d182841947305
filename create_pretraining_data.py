"""Text to pre-training records: masked LM and next-sentence examples.

  python create_pretraining_data.py --input_file='runs/corpus/train*.txt' \\
      --output_file=records/train.tfrecord --vocab_file=vocab.txt
  horovodrun -np 4 -H host1:1,host2:1,host3:1,host4:1 \\
      python create_pretraining_data.py ...
  sbatch --array=0-15%4 ... python create_pretraining_data.py ...

writes records/train-00000-of-00004.tfrecord ... with an index beside each, and
records/train.manifest.json. Flags, instances and masks are google/bert's.

The bytes do not depend on the number of workers or machines, and memory does
not depend on the size of the text: a document longer than a block of records is
cut into several. A stop leaves the finished work in
records/train.tfrecord.unfinished, from which the same command resumes.
"""

from common.settings import run_with
from records import creation, record_report
from workers import launchers, work_dir


def report(summary: creation.Summary) -> str:
  """The closing table."""
  manifest = summary.manifest
  c, files, num_records = manifest.counts, manifest.files, manifest.num_records
  fill = c["real_tokens"] / (num_records * manifest.max_seq_length)
  pairs, masked = "none: masked LM alone", "drawn in training"
  if manifest.has_pairs:
    pairs = record_report.next_sentences(c["random_next"], c["examples"])
  if manifest.masking == "static":
    masked = f"{c['masked_tokens']:,}"
  rows = {
    "documents": f"{c['documents']:,}",
    "sentences": f"{c['sentences']:,}",
    "tokens": f"{c['tokens']:,}",
    "unknown tokens": f"{c['unknown_tokens'] / c['tokens']:.3%}",
    "unknown letters": f"{c['unknown_letters'] / c['letters']:.3%}, in unknown "
    "words or left out",
    "unigram entropy": f"{c['unigram_entropy']:.3f} nats",
    "examples": f"{c['examples']:,}",
    "records": f"{num_records:,} of {manifest.packing_factor:.2f} examples",
    "random next": pairs,
    "masked tokens": masked,
    "fill": f"{fill:.1%} of tokens are not padding",
    "time": f"{summary.seconds:.1f} s, "
    f"{c['text_bytes'] / 1e6 / summary.seconds:.2f} MB of text/s",
    "files": f"{len(files)}, {files[0].name} ...",
    "manifest": summary.manifest_path,
  }
  if c["cut_documents"]:
    cut = f"{c['cut_documents']:,}, because they are longer than a block"
    rows["cut documents"] = cut
  if summary.kept:
    rows["kept"] = summary.kept
  tokens = c["tokens"] / c["sentences"]
  if manifest.has_pairs and not manifest.settings["prose"] and tokens > 80:
    note = f"{tokens:.0f} tokens a sentence: if a line is a paragraph, give "
    rows["note"] = f"{note}--prose=en (or your language)"
  return "\n".join([f"{name:<16} {value}" for name, value in rows.items()])


def main(settings: creation.CreationSettings) -> None:
  """Makes records and prints their table."""

  def make(worker: work_dir.Worker) -> list[str] | None:
    summary = creation.create(settings, worker)
    return report(summary).splitlines() if summary else None

  launchers.run_worker(settings.workers, make, settings.manifest_path)


if __name__ == "__main__":
  run_with(creation.CreationSettings, main)
