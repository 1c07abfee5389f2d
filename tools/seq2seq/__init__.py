"""Training an encoder-decoder pair on pairs of texts, one noun per file."""
