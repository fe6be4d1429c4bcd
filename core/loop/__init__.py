"""What train.py opens: a run and its outputs."""
