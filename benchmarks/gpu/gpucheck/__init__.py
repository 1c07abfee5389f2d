"""What is verified on a GPU, step by step; `../check.py` runs it."""
