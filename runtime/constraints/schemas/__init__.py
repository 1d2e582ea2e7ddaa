"""JSON schemas: pure functions that turn any schema into one that llguidance enforces, or refuse it."""
