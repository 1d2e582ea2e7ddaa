"""A fleet of engines in virtual time: what the choice among them is worth, and what it costs."""
