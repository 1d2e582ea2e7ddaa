"""Benchmarks of servers over the OpenAI API: ours and others, under the same load from the same client."""
