"""Starts the engines and gateways of a fleet, keeps them running, and says which there are: on Ray Serve.

No token passes here: engines and gateways are processes of their own that speak with each other.
"""
