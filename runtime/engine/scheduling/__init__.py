"""What the next step feeds: pure bookkeeping of requests, tenants and time, without tensors, an engine or a clock."""
