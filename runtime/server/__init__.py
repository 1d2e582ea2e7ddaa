"""An OpenAI-compatible HTTP server over an :class:`runtime.client.EngineClient`."""
