"""Passes over standard operators, for any compiler."""
