"""What the commands do once their options are read. Heavy libraries are imported here, never by the command line."""
