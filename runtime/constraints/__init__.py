"""Structured output: constraints become masks. The gateway checks them, the engine compiles them."""
