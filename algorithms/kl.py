"""KL divergences from samples: estimates of their values, and terms that have their gradient."""

from torch import Tensor

from algorithms.options import KL


def kl_estimate(logprobs: Tensor, other: Tensor, kind: KL = "k3") -> Tensor:
    """Per-token estimates of KL(π ‖ other) from samples of π, in nats; with d = log π - log other:

        k1 = d,    k2 = d²/2,    k3 = exp(-d) - 1 + d      http://joschu.net/blog/kl-approx.html

    k1 and k3 are unbiased, k3 is never negative, and the mean of k2 is close to the KL if d is
    small. That holds for the values of the estimates; `weighted_kl` has their gradients.

    >>> import torch
    >>> kl_estimate(torch.tensor([0.0]), torch.tensor([-1.0]), "k2")
    tensor([0.5000])
    """
    difference = logprobs - other
    if kind == "k1":
        return difference
    return difference**2 / 2 if kind == "k2" else (-difference).exp() - 1 + difference


def weighted_kl(logprobs: Tensor, ratio: Tensor, other: Tensor, kind: KL) -> Tensor:
    """Per-token terms for the loss, whose expected gradient is that of KL(π ‖ other); [n].

    π_old sampled the tokens, so each estimate is multiplied by the policy ratio ρ = π / π_old:

        ρ k1, ρ k3      with the gradient through ρ                          arXiv:2512.02556
        sg[ρ] k2        sg: no gradient through ρ. E_old[ρ ∇ k2] = E_π[d ∇ log π], which is the
                        gradient of the KL                                   arXiv:2506.09477

    With ρ detached, the expected gradient of k1 would be 0, that of k3 the gradient of KL(other ‖
    π). No estimate counts how π changes the contexts of later tokens. Gradients flow through
    `logprobs` and `ratio`.
    """
    estimate = kl_estimate(logprobs, other, kind)
    return (ratio.detach() if kind == "k2" else ratio) * estimate
