"""An evening on sampling, 1 of 3. One completion after another, and no cache.

For each token the model reads the whole text again. `TorchSampler` (core/sampler.py) draws the same
tokens faster: all completions get their next token in one step; a cache keeps what attention needs
of the tokens before, their keys and values (core/kv_cache.py); common beginnings are computed once.

    sampler = PlainSampler(policy)
    sampler.sample(prompts, SamplingParams(max_tokens=64, seed=0))     a Completion for each prompt
"""

import torch

from core.policy import Policy
from core.sampler import Request, Sampler, completion_limit, draw, to_completion, uniforms
from core.types import Completion


class PlainSampler(Sampler):
    """Samples from the training model itself, one completion in each step."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.waiting: list[Request] = []

    def add(self, request: Request) -> None:
        completion_limit(self.policy, request)  # raises if the prompt is too long
        self.waiting.append(request)

    def clear(self) -> None:
        self.waiting = []

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, Completion]]:
        request = self.waiting.pop(0)
        limit = completion_limit(self.policy, request)
        # One random number in [0, 1) for each possible token decides which id is drawn; seed and
        # stream decide the numbers. The stream is the prompt's place in the list for `sample`, and
        # in training the number of the episode · 1000 + that of the agent (core/episodes.py)
        chances = uniforms(request.seed, request.stream, limit)  # [limit]
        token_ids: list[int] = []
        logprobs: list[float] = []
        while len(token_ids) < limit and not (token_ids and token_ids[-1] in self.policy.stop_ids):
            text = torch.tensor([request.prompt + token_ids], device=self.policy.device)  # [1, T]
            # causal_lm is the model of transformers, LoRA included
            logits = self.policy.causal_lm(text).logits[:, -1]  # [1, V], of the next token
            chance = chances[len(token_ids), None]
            token, logprob = draw(logits, request.params, chance)  # [1] each
            token_ids.append(int(token))
            logprobs.append(float(logprob))
        return [(request, to_completion(self.policy, token_ids, logprobs))]
