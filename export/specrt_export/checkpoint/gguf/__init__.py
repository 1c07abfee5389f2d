"""GGUF files: their container, blocks, configuration, weights and vocabulary. No torch here."""
