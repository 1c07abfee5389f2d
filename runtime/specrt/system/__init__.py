"""What this machine is: processor, memory, GPUs, and what they can run."""
