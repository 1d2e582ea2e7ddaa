"""A fleet in virtual time: scheduler, cache and router are those of the server, a step's length is a model."""
