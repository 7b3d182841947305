"""Fine-tunes BERT to label words (named entities, tags), on Horovod ranks.

  python run_ner.py --do_train --do_eval --do_predict \\
    --train_file=conll/train.txt --eval_file=conll/valid.txt \\
    --predict_file=conll/test.txt --init_checkpoint=runs/first \\
    --output_dir=runs/ner --learning_rate=5e-5

The data are columns as CoNLL's, the word first and its label last, or JSON
lines as {"tokens": ["It", "rains"], "ner_tags": ["O", "O"]}. Labels are IOB1,
IOB2, IOBES or plain ones; they are found in the data to train on. What the
model in --output_dir was trained with need not be given again.
"""

from finetuning.ner import Ner, NerConfig
from interop import run_settings

if __name__ == "__main__":
  run_settings.run_finetuning(NerConfig, Ner)
