"""One file per peer. Each runs in its own virtual environment: ``python -m benchmarks.peers.adapters.NAME``."""
