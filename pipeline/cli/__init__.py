"""The `tapeout` command."""
