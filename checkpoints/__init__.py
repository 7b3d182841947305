"""A run's files: its description, its states, its metrics."""
