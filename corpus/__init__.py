"""Documents of any format to clean text, without TensorFlow."""
