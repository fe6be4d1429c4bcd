"""What a flag or a command of its own switches on; nothing here is needed by the default run."""
