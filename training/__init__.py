"""Training: settings, data, the update, ranks, checkpoints and the loop."""
