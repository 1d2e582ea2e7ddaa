"""How often the gate passes what it must not, and passes what is good: simulated with the code that judges."""
