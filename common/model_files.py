"""Names of the files that describe a model."""

RUN_FILE, TASK_FILE, CONFIG_FILE = "run.json", "task.json", "bert_config.json"
THEIR_CONFIG = "config.json"  # of Hugging Face's folders
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
