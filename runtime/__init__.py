"""The thin batching runtime around a loaded engine: tokens in, text out. Never imports torch."""
