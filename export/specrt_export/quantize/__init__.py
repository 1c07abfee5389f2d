"""Weight-only quantization: which weights, in which numbers, streamed into a graph of its own."""
