"""The HTML report of a run, its charts and its tables."""
