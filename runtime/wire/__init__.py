"""What passes between gateway and engine. Both sides import it."""
