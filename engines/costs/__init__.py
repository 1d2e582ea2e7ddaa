"""What operators and memory cost on this machine, measured."""
