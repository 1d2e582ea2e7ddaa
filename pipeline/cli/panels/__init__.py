"""The options and help of every command, one module for each panel of ``tapeout --help``.

The work of a command is done by the modules that it imports when it runs.
"""
