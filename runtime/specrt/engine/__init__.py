"""Compiled models under one protocol: one verb over fixed KV buffers."""
