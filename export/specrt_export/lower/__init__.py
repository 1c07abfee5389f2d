"""Rewrites from the portable graph to the form a backend runs fastest."""
