"""Compiled models after one protocol: one verb over fixed KV buffers."""
