"""The folder and the process of a run: files, log, checkpoint, terminal, signals, memory."""
