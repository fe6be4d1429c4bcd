"""What train.py opens: a run, its evaluator and its outputs."""
