"""The network: its layers, their arithmetic and types, what is compiled."""
