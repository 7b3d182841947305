"""Trains BERT to embed texts, for search and similarity, on Horovod ranks.

  python run_embedder.py --do_train --do_eval \\
    --train_file=pairs.jsonl --eval_file=dev.jsonl --output_dir=runs/embedder \\
    --init_checkpoint=runs/first --train_batch_size=64 --learning_rate=5e-5

The data are a table of pairs of texts by its columns (--text_column and
--text_pair_column), perhaps with negatives or scores, or of single texts
(--simcse). All texts of an update are compared, on any number of ranks and
micro-batches. What the model in --output_dir was trained with need not be
given again.
"""

from finetuning.embedding import EmbedderConfig, Embedding
from interop import run_settings

if __name__ == "__main__":
  run_settings.run_finetuning(EmbedderConfig, Embedding)
