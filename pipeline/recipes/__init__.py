"""Recipes that ship beside the default."""
