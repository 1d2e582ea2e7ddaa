"""The kinds of evidence, one file each. A file holds everything that is special to its kind."""
