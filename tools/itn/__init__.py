"""Inverse text normalisation: spoken forms to written ones, by rule, one noun per file."""
