"""The build machine: checkpoints to portable graphs to compiled bundles."""
