"""Heads: small drafts that read the hidden states of their target."""
