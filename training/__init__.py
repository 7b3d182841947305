"""A run: settings, input, loop, checkpoints, reports, stopping."""
