"""What operators see: health, metrics, traces, the live page, and shadow traffic."""
