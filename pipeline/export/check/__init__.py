"""Whether an exported graph computes what transformers computes."""
