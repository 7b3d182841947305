"""What is on the disk of a run: its description, states, metrics."""
