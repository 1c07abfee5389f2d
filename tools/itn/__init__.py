"""Inverse text normalisation as a task: spoken forms to written ones, by rule, one noun per file."""
