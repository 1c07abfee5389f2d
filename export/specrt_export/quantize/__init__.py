"""Weight-only quantization of portable graphs."""
