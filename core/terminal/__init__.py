"""The terminal: the command line, the display of a run, and Ctrl-C."""
