"""Graph rewrites, one file each: a pattern, a rewrite, and the reason when it does not apply."""
