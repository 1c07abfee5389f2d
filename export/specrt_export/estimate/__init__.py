"""What a model takes, from its configuration alone: memory, bytes, time."""
