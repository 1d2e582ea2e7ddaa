"""Connections, routes and responses."""
