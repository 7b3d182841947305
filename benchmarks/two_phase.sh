#!/usr/bin/env bash
# BERT-mini on 40 MB of English in two phases, sequences of 32 and then of 128:
# the curves in results/two_phase_*.png. An hour and a half on two cores.
#
#   benchmarks/two_phase.sh runs/two_phase
set -euo pipefail
folder=${1:?usage: benchmarks/two_phase.sh FOLDER}
cd "$(dirname "$0")/.."
python=.venv/bin/python

mkdir -p "$folder"
$python benchmarks/mixed_corpus.py "$folder/text"
$python -m tools.prepare_corpus --output_dir="$folder/corpus" --corpus="$folder/text/*.txt"
$python -m tools.train_tokenizer --input_file="$folder/corpus/train.txt" \
  --output_file="$folder/vocab.txt" --vocab_size=8192
make_records() {  # part, length, predictions, copies, then flags
  $python create_pretraining_data.py --input_file="$folder/corpus/$1.txt" \
    --vocab_file="$folder/vocab.txt" --output_file="$folder/records$2/$1.tfrecord" \
    --max_seq_length="$2" --max_predictions_per_seq="$3" --dupe_factor="$4" "${@:5}"
}
make_records train 32 5 2
make_records heldout 32 5 1
make_records train 128 28 5 --masked_lm_prob=0.2 --dynamic_masks --examples_per_record=8
make_records heldout 128 20 1 --examples_per_record=8

# google/bert's mini with our vocabulary. No dropout: the text is seen a few
# times, with other masks. initializer_range: 0.02 * sqrt(768 / 256).
cat > "$folder/bert_config.json" <<'JSON'
{"vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 4,
 "num_attention_heads": 4, "intermediate_size": 1024, "hidden_act": "gelu",
 "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
 "max_position_embeddings": 512, "type_vocab_size": 2,
 "initializer_range": 0.035}
JSON

pretrain() {  # length, folder, then flags
  .venv/bin/horovodrun -np 2 $python run_pretraining.py --do_train --do_eval \
    --bert_config_file="$folder/bert_config.json" \
    --input_file="$folder/records$1/train*.tfrecord" \
    --eval_input_file="$folder/records$1/heldout*.tfrecord" \
    --output_dir="$folder/$2" --bias_correction --beta_2=0.98 \
    --log_every_steps=25 "${@:3}"
}
pretrain 32 phase1 --global_batch_size=96 --train_batch_size=48 \
  --learning_rate=1.5e-3 --num_train_steps=5000 --num_warmup_steps=400 \
  --eval_every_steps=500 --max_eval_steps=100 --save_checkpoints_steps=1000
pretrain 128 phase2 --init_checkpoint="$folder/phase1/model.ckpt-5000" \
  --global_batch_size=64 --train_batch_size=32 \
  --precision=bf16 --learning_rate=1.2e-3 --num_train_steps=5600 --num_warmup_steps=150 \
  --eval_every_steps=700 --max_eval_steps=30 --save_checkpoints_steps=700
for phase in phase1 phase2; do
  $python -m tools.plot_metrics --output="$folder/$phase.png" "$folder/$phase"
done
