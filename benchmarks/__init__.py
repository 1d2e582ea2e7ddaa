"""Measurements that need more than the project itself: other engines, quiet machines, minutes."""
