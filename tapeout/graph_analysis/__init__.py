"""Read from the graph which linears share an input, what each is for, and what can absorb their input scales."""
