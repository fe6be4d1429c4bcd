"""One file per third-party library: its environments behind our interface."""
