"""Function-preserving growth of a Llama-family checkpoint, one noun per file."""
