"""Turn a lowered graph into a plan of TensorRT, or of TensorRT for RTX."""
