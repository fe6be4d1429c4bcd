"""The program behind scratch.py: checks the exercises, and trains with them."""
