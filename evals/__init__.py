"""Quality, shadow and parity evidence, the statistics over it, and the gate that judges it."""
