"""What train_pair.py is made of. Times are in seconds, losses in nats per token."""
