"""Compilers: one module a backend, each from a portable graph to a saved engine."""
