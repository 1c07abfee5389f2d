"""Compare specrt with other runtimes on the same prompts, weights, precision and threads."""
