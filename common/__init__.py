"""What all layers use: TensorFlow in 1.x mode, errors, files, settings."""
