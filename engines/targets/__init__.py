"""One module per target: which passes lower the portable graph, and how the result is run."""
