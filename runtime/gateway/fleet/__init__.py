"""One gateway in front of many engines: which there are, how each of them is, and requests that survive their death."""
