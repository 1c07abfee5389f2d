"""TensorRT plans: one context per width, one set of KV buffers, a CUDA graph for each pass."""
