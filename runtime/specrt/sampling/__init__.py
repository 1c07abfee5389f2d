"""Rows of logits: distributions, noise, processors and grammars. Pure functions of arrays."""
