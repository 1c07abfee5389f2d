"""Compiled models behind one protocol: one verb over fixed KV buffers."""
