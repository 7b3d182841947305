"""Names of the files that describe a model."""

RUN_FILE, TASK_FILE, CONFIG_FILE = "run.json", "task.json", "bert_config.json"
# Flag -> the name of such a vocabulary beside a published checkpoint.
VOCABULARIES = {"vocab_file": "vocab.txt", "spm_model_file": "spiece.model"}
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
