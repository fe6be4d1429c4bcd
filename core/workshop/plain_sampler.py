"""An evening on sampling, 1 of 3. One completion after another, and no cache.

For each token the model reads the whole text again. `TorchSampler` (core/sampler.py) draws the same
tokens: there, all completions get their next token in one step, what attention needs of the tokens
before, their keys and values, is kept (core/kv_cache.py), and common beginnings are computed once.

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
        # request.stream is the prompt's place in the list. One number in [0, 1) for each token that
        # may come; it decides which token is drawn
        numbers = uniforms(request.seed, [request.stream], limit)  # [1, limit]
        token_ids: list[int] = []
        logprobs: list[float] = []
        while len(token_ids) < limit and not (token_ids and token_ids[-1] in self.policy.stop_ids):
            text = torch.tensor([request.prompt + token_ids], device=self.policy.device)  # [1, T]
            logits = self.policy.causal_lm(text).logits[:, -1]  # [1, V], of the next token
            token, logprob = draw(logits, request.params, numbers[:, len(token_ids)])  # [1] each
            token_ids.append(int(token))
            logprobs.append(float(logprob))
        return [(request, to_completion(self.policy, token_ids, logprobs))]
