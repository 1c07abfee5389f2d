"""Costs and the fastest setting of a bundle on this machine, and the record of both."""
