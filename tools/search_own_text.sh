#!/usr/bin/env bash
# A search over the articles of `make pretrain`, by an embedder that its own encoder
# becomes: `make search QUERY='...'`.
#
#   tools/search_own_text.sh runs/quickstart 'a river in France'
#
# The text has no titles: an article's first sentence learns to find the rest of it, and
# is measured on the articles that were held out. A second start keeps the embedder: remove
# search/embedder after more training.
set -euo pipefail
root=$1 query=$2
bin=.venv/bin
[ -e "$root/pretrain/checkpoint" ] || {
  echo "make search: error: $root has no trained encoder: name the OUTPUT_DIR of a make pretrain, or run that" >&2
  exit 1
}

mkdir -p "$root/search/qrels"
for part in train heldout; do
  # Each article: its name, first sentence and the others, as JSON.
  awk -v part="$part" 'BEGIN {RS = ""; FS = "\n"}
    NF > 1 {
      first = $1; $1 = ""; sub(/^ +/, "")
      gsub(/[\\"]/, "\\\\&", first); gsub(/[\\"]/, "\\\\&")
      gsub(/[[:cntrl:]]/, " ", first); gsub(/[[:cntrl:]]/, " ")
      printf "{\"_id\": \"%s %d\", \"anchor\": \"%s\", \"text\": \"%s\"}\n", part, NR, first, $0
    }' "$root/corpus/$part.txt" >"$root/search/$part.jsonl"
done
cat "$root"/search/{heldout,train}.jsonl >"$root/search/corpus.jsonl"
# Names of queries are no names of documents: BEIR leaves a query's own document out.
sed 's/, "text": ".*/}/; s/"anchor"/"text"/; s/"heldout /"query /' "$root/search/heldout.jsonl" \
  >"$root/search/queries.jsonl"
{
  printf 'query-id\tcorpus-id\tscore\n'
  sed 's/{"_id": "heldout \([0-9]*\)".*/query \1\theldout \1\t1/' "$root/search/heldout.jsonl"
} >"$root/search/qrels/test.tsv"

# A small text has fewer articles than an update.
batch=$(head -n 128 "$root/search/train.jsonl" | wc -l)
$bin/python run_embedder.py --do_train --do_eval --init_checkpoint="$root/pretrain" \
  --output_dir="$root/search/embedder" --train_file="$root/search/train.jsonl" \
  --eval_file="$root/search/heldout.jsonl" --text_pair_column=text --max_seq_length=64 \
  --train_batch_size="$batch" --learning_rate=5e-4 --num_train_epochs=3 --precision=auto
$bin/python -m tools.search "$root/search/embedder" --documents="$root/search" --evaluate
$bin/python -m tools.search "$root/search/embedder" --documents="$root/search" --query="$query"
