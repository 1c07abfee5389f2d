"""Recipes: what they may say, and what of it cannot be together."""
