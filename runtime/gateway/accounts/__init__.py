"""Who calls and what they used: keys, usage records, and the log of traffic."""
