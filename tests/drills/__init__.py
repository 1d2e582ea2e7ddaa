"""What a plug-in costs: each drill adds one to a copy of the checkout, uses it, and counts the old files it edits."""
