"""Verify on a GPU what no other machine can: numbers, captured graphs, speed."""
