"""Training an encoder-decoder pair on pairs of texts, one noun per file; what it shares is in pair/."""
