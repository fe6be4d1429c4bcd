"""Pure functions, tensors in and tensors out; reinforce, grpo and ppo line up, so diff them."""
