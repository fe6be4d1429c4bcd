"""What the loop stands on: rollouts, the sampler, the model, batching, the journal."""
