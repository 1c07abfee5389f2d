"""Checkpoints: where they are, what their files hold, in whatever form."""
