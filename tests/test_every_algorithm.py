"""What must hold of every algorithm and variant: masks, padding, and how a step is cut."""

import pytest
import torch

from algorithms import grpo, ppo, reinforce
from algorithms.common import Micro, token_weights
from algorithms.variants import cispo, dppo, gdpo, gspo, kl_cov, opsm

JUNK = [float("nan"), float("inf"), float("-inf")]
LOSSES = {
    "reinforce": (reinforce, reinforce.Options()),
    **{name: (grpo, grpo.resolve(grpo.Options(name))) for name in grpo.LOSS_TYPES},
    "gspo": (gspo, gspo.Options()),
    "gspo, clipped seldom": (gspo, gspo.Options(clip_high=0.2)),
    "cispo": (cispo, cispo.resolve(cispo.Options())),
    "scalerl": (cispo, cispo.resolve(cispo.Options("scalerl"))),
    "dppo": (dppo, dppo.Options(limit=0.05)),
    "gdpo": (gdpo, gdpo.Options()),
    "kl_cov": (kl_cov, grpo.resolve(kl_cov.Options())),
    "opsm": (opsm, grpo.resolve(opsm.Options(reject_low=0.8))),
    "ppo": (ppo, ppo.Options()),
    "ppo, values not clipped": (ppo, ppo.Options(value_clip=0.0)),
}
ROWS = 8
SPLITS = [[[7, 4, 5], [6], [1, 0, 3, 2]], [range(0, ROWS, 2), range(1, ROWS, 2)]]


def draw():
    """All that is known of 8 rollouts: random, with gaps in the mask, the last without a token."""
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, 6)

    def normal():
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(shape, generator=generator) < 0.7
    mask[-1] = False
    return {
        "mask": mask,
        "contexts": torch.randint(5, shape, generator=generator),
        "tokens": torch.randint(5, shape, generator=generator),
        "noise": normal() * 0.4,  # of the old log-probs: ratios on both sides of the clip
        "advantages": normal(),
        "weights": normal().exp(),
        "values": normal(),
        "targets": normal(),
    }


def padded(tensors):
    """The same with columns that aren't sampled to the left, between, and to the right."""
    columns = torch.tensor([-1, 0, 1, -1, -1, 2, 3, 4, 5, -1])
    wide = {name: x[:, columns.clamp(min=0)] for name, x in tensors.items()}
    wide["mask"] &= columns >= 0
    return wide


def spoilt(tensors, junk, *names):
    """The same with `junk` off the mask of the named tensors."""
    return tensors | {name: tensors[name].masked_fill(~tensors["mask"], junk) for name in names}


def step(name, known, parts=(range(ROWS),), junk=0.0):
    """One step of a policy that is a table of logits and one of values, from `parts` of the rows:
    loss, gradients and metrics, each added up. `junk` stands in what it says off the mask."""
    module, options = LOSSES[name]
    scale = token_weights(known["mask"], options.aggregation, max_tokens=6)
    torch.manual_seed(1)
    logits, values = (torch.randn(n, dtype=torch.float64).requires_grad_() for n in ((5, 5), (5,)))
    totals = {"loss": 0.0}
    for rows in parts:
        at = {key: x[list(rows)] for key, x in (known | {"scale": scale}).items()}
        mask = at["mask"]
        off = torch.where(mask, 0.0, junk)  # added, so that gradients pass
        logprobs = logits.log_softmax(-1)[at["contexts"], at["tokens"]]
        old = logprobs.detach() + at["noise"]
        micro = Micro(
            completion_mask=mask, loss_mask=mask, old_logprobs=old,
            sampler_logprobs=old - at["noise"], advantages=at["advantages"],
            importance_weights=at["weights"], token_weights=at["scale"] + off,
            values=at["values"], value_targets=at["targets"],
            own={"penalty_coef": at["weights"]},
        )  # fmt: skip
        new_values = values[at["contexts"]] + off
        loss, metrics = module.compute_loss(logprobs + off, new_values, micro, options)
        loss.backward()
        for key, value in {"loss": loss.item(), **metrics}.items():
            totals[key] = totals.get(key, 0.0) + value
    numbers = {key: torch.tensor(value, dtype=torch.float64) for key, value in totals.items()}
    return numbers | {"logits": logits.grad, "values": values.grad if module is ppo else values * 0}


def same(got, want):
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_neither_how_a_step_is_cut_nor_padding_nor_masked_tokens_change_it(name):
    want = step(name, draw())
    assert want["logits"].abs().max() > 0.01
    for parts in SPLITS:
        same(step(name, draw(), parts), want)
    same(step(name, padded(draw())), want)
    for junk in JUNK:
        known = spoilt(draw(), junk, "noise", "advantages", "weights", "values", "targets")
        same(step(name, known, junk=junk), want)
    nothing = step(name, draw() | {"mask": torch.zeros(ROWS, 6, dtype=torch.bool)})
    assert all((x == 0).all() for x in nothing.values())
