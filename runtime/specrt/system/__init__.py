"""What this machine is, what memory and GPUs it has, and what it can run."""
