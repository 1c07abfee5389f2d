"""Adapters that run the server on engines for fleets, and files that configure others."""
