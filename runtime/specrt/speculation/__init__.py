"""The algorithm: the round, the target, drafters and the gamma policy."""
