"""Engines of ONNX Runtime, on the CPU kernels, on its own operators and on NVIDIA GPUs."""
