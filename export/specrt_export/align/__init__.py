"""Drafts trained on what their target wrote."""
