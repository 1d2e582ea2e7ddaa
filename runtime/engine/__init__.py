"""What runs beside an engine: scheduler, sampling, and the process of its own. It knows no text."""
