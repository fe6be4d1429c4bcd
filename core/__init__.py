"""What the loop in train.py calls: rollouts, sampler, model, batching and the files of a run."""
