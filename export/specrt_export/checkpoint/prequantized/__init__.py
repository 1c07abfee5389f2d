"""Folders of safetensors that hold quantized weights: GPTQ, AWQ, compressed-tensors, FP8."""
