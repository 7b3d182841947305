"""From text to records and their order, without TensorFlow."""
