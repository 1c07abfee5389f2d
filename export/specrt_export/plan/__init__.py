"""A recipe resolved: every fact of a build, before anything is built."""
