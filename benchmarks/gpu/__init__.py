"""Engines on the GPU they were compiled for."""
