"""Bias and variance of the corrections for a sampler that is not the policy, computed exactly.

    python runs/off_policy/table.py      # seconds; writes the table into README.md

A chain of 8 tokens over a vocabulary of 3: all 6,561 sequences are enumerated, so expectations are
sums. The policy and the sampler have random logits for each position and previous token; the
sampler's differ from the policy's by Gaussian noise. Each sequence has a random return. The table
compares the gradient of the expected return under the policy with the expected gradient of
REINFORCE on sequences of the sampler, with the weights of algorithms/off_policy.py.
"""

import itertools
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402

from algorithms import off_policy, reinforce  # noqa: E402
from algorithms.tokens import Tokens  # noqa: E402
from algorithms.variants.opsm import Options, kept_tokens  # noqa: E402

VOCABULARY, LENGTH = 3, 8
NOISE = {"0.02 (rounding)": 0.02, "0.3 (a stale policy)": 0.3}
# name in the literature: (level, cap, mode, lowest and highest geometric mean, OPSM's limit)
ESTIMATORS = {
    "no correction": ("token", 0, "truncate", 0, 0, 0),
    "token TIS: `--tis-cap 2`": ("token", 2, "truncate", 0, 0, 0),
    "token MIS, IcePop: `--tis-mode mask`": ("token", 2, "mask", 0, 0, 0),
    "geometric mean: `--tis-level geometric`": ("geometric", 2, "truncate", 0, 0, 0),
    "sequence TIS: `--tis-level product`": ("product", 2, "truncate", 0, 0, 0),
    "sequence TIS, `--tis-cap 1000`": ("product", 1000, "truncate", 0, 0, 0),
    "sequence MIS: `--tis-level product --tis-mode mask`": ("product", 2, "mask", 0, 0, 0),
    "token TIS in a band: `--opsm.reject-low 0.95 --opsm.reject-high 1.1`": (
        "token", 2, "truncate", 0.95, 1.1, 0,
    ),
    "token TIS and OPSM: `--opsm.limit 0.05`": ("token", 2, "truncate", 0, 0, 0.05),
}  # fmt: skip


class Chain:
    """All sequences of a chain, and the log-probs of their tokens under policy and sampler."""

    def __init__(self, noise: float, length: int = LENGTH, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        shape = (length, VOCABULARY + 1, VOCABULARY)  # position, previous token (0: none), token
        self.logits = normal(*shape).requires_grad_()
        sampler_logits = self.logits.detach() + noise * normal(*shape)
        sequences = list(itertools.product(range(VOCABULARY), repeat=length))
        self.tokens = torch.tensor(sequences)  # [sequences, T]
        self.previous = torch.nn.functional.pad(self.tokens[:, :-1] + 1, (1, 0))
        self.returns = normal(len(sequences))
        self.sampler_logprobs = self.logprobs(sampler_logits)
        self.chances = self.sampler_logprobs.sum(1).exp()  # of each sequence, in the sampler

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-prob of each token of each sequence, [sequences, T]."""
        position = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
        return logits.log_softmax(-1)[position, self.previous, self.tokens]

    def advantages(self) -> torch.Tensor:
        """Returns minus their expectation under the policy, for each token: [sequences, T]."""
        chances = self.logprobs(self.logits.detach()).sum(1).exp()
        return (self.returns - chances @ self.returns)[:, None].expand_as(self.tokens)

    def all_tokens(self, logprobs: torch.Tensor) -> Tokens:
        """The tokens of all sequences, as one micro-batch."""
        sequence = torch.arange(len(self.tokens)).repeat_interleave(self.tokens.shape[1])
        return Tokens(
            sequence=sequence, in_loss=sequence >= 0,
            logprobs=logprobs.flatten(), old_logprobs=logprobs.detach().flatten(),
            sampler_logprobs=self.sampler_logprobs.flatten(),
            advantages=self.advantages().flatten(),
        )  # fmt: skip

    def true_gradient(self) -> torch.Tensor:
        """The gradient of the expected return under the policy."""
        expected = (self.logprobs(self.logits).sum(1).exp() * self.returns).sum()
        return torch.autograd.grad(expected, self.logits)[0].flatten()

    def gradients(self, weights: torch.Tensor) -> torch.Tensor:
        """What each sequence adds to the gradient, [sequences, logits], by our own loss."""
        logits = self.logits.detach().expand(len(self.tokens), *self.logits.shape).clone()
        logits.requires_grad_()
        position = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
        row = torch.arange(len(self.tokens))[:, None].expand_as(self.tokens)
        logprobs = logits.log_softmax(-1)[row, position, self.previous, self.tokens]
        tokens = self.all_tokens(logprobs)
        tokens.importance_weights, tokens.token_weights = weights, torch.ones_like(weights)
        loss, _ = reinforce.compute_loss(tokens, reinforce.Options())
        return -torch.autograd.grad(loss, logits)[0].flatten(1)

    def weights(
        self, level: str, cap: float, mode: str, low: float, high: float, opsm: float
    ) -> torch.Tensor:
        """The weight of each token, from the functions that training uses."""
        tokens = self.all_tokens(self.logprobs(self.logits.detach()))
        ratio = off_policy.sampler_ratio(tokens, level)
        weights = off_policy.importance_weights(ratio, cap, mode)
        options = Options(limit=opsm, reject_low=low, reject_high=high)
        return weights * kept_tokens(tokens, options)


def bias_and_variance(chain: Chain, weights: torch.Tensor) -> tuple[float, float]:
    """|E g - true gradient| / |true gradient|, and E|g - E g|^2 / |true gradient|^2."""
    true = chain.true_gradient()
    each = chain.gradients(weights)
    mean = chain.chances @ each
    variance = chain.chances @ (each - mean).square().sum(1)
    return ((mean - true).norm() / true.norm()).item(), (variance / true.norm() ** 2).item()


def table() -> list[str]:
    chains = {name: Chain(noise) for name, noise in NOISE.items()}
    columns = [f"{what}, noise {name}" for name in chains for what in ("bias", "variance")]
    rows = []
    for name, settings in ESTIMATORS.items():
        cells = [name]
        for chain in chains.values():
            bias, variance = bias_and_variance(chain, chain.weights(*settings))
            cells += [f"{bias:.4f}", f"{variance:.0f}"]
        rows.append(cells)
    return record.markdown(" | ".join(["estimator", *columns]), rows)


if __name__ == "__main__":
    record.write_table(HERE, table())
