"""What passes cost on this machine, and which settings follow from it."""
