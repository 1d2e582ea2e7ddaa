"""The HTTP server: the OpenAI API over an engine's process, and what operators need around it."""
