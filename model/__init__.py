"""The network: encoder, layers, kernels, tensor slicing, initial weights."""
