"""Opens a run and its outputs for train.py, and does its work between two updates."""
