"""How the gateway reaches an engine."""
