"""Trained models that answer: where they are, their signatures, their words."""
