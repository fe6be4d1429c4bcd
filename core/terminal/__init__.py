"""What a person meets in the terminal: the command line, the display, Ctrl-C."""
