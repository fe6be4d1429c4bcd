"""The workshop: the program behind scratch.py, and `--algo scratch`."""
