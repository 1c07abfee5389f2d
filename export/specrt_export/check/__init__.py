"""Compares exports and engines with what they were made from."""
