"""From a checkpoint to its portable graph, and reading one."""
