"""Hugging Face's BERT folders: their weights, config and tokenizer files."""
