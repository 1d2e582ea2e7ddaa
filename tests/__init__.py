"""Tests, grouped by what they need: unit, integration, golden, gpu."""
