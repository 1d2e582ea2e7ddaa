"""One peer a file, each run in that peer's own environment: ``python -m benchmarks.peers.adapters.NAME``."""
