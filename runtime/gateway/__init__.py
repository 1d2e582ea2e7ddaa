"""What clients talk to: HTTP, text, keys and metrics. It computes no token: engines run in processes of their own."""
