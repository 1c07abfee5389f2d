"""The algorithm: rounds, drafters, and how far to draft."""
