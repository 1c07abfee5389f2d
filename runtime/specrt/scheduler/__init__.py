"""Requests share passes: queue, slots, prompt cache and batches."""
