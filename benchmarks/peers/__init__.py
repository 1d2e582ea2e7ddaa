"""Compare our bundles with other engines on this processor, in one alternating run: ``make bench-peers``."""
