"""What must hold of every algorithm and variant: masks, padding, order, and how a step is cut."""

import pytest
import torch

from algorithms import grpo, ppo, reinforce
from algorithms.common import token_weights

JUNK = [float("nan"), float("inf"), float("-inf")]
LOSSES = {
    "reinforce": (reinforce, reinforce.Options()),
    **{name: (grpo, grpo.with_loss_type(grpo.Options(name))) for name in grpo.LOSS_TYPES},
    "grpo, dual clip": (grpo, grpo.with_loss_type(grpo.Options(dual_clip=1.2))),
    "gspo, clipped seldom": (grpo, grpo.with_loss_type(grpo.Options("gspo", clip_high=0.2))),
    "gspo, as cispo": (grpo, grpo.with_loss_type(grpo.Options("gspo", surrogate="cispo"))),
    "ppo": (ppo, ppo.Options()),
    "ppo, values not clipped": (ppo, ppo.Options(value_clip=0.0)),
}
CREDITS = {
    **{
        f"reinforce, {baseline}{', normalized' * normalize}": (
            reinforce,
            reinforce.Options(baseline, normalize),
        )
        for baseline in ("batch", "group", "leave_one_out", "none")
        for normalize in (False, True)
    },
    **{f"grpo, {x}": (grpo, grpo.Options(scale_rewards=x)) for x in ("group", "batch", "none")},
    "ppo": (ppo, ppo.Options()),
}
ROWS = 8
SPLITS = {
    "micro-batches": [[0], [1, 2, 3], [4, 5, 6, 7]],
    "in another order": [[7, 4, 5], [6], [1, 0, 3, 2]],
    "2 ranks": [range(0, ROWS, 2), range(1, ROWS, 2)],
    "4 ranks": [range(rank, ROWS, 4) for rank in range(4)],
}


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
        "old_values": normal(),
        "targets": normal(),
    }


def padded(tensors):
    """The same with columns that aren't sampled to the left, between, and to the right."""
    columns = torch.tensor([-1, 0, 1, -1, -1, 2, 3, 4, 5, -1])
    wide = {name: x[:, columns.clamp(min=0)] for name, x in tensors.items() if x.dim() == 2}
    wide["mask"] &= columns >= 0
    return tensors | wide


def spoilt(tensors, junk, names):
    """The same with `junk` off the mask of the named tensors."""
    return tensors | {name: tensors[name].masked_fill(~tensors["mask"], junk) for name in names}


def step(name, known, parts=(range(ROWS),), junk=0.0):
    """One step of a policy that is a table of logits and one of values, from `parts` of the rows:
    loss, gradients and metrics, each added up. `junk` stands in what it says off the mask."""
    module, options = LOSSES[name]
    scale = token_weights(known["mask"], getattr(options, "aggregation", "token"), max_tokens=6)
    torch.manual_seed(1)
    logits, values = (torch.randn(n, dtype=torch.float64).requires_grad_() for n in ((5, 5), (5,)))
    totals = {"loss": 0.0}
    for rows in parts:
        at = {key: x[list(rows)] for key, x in (known | {"scale": scale}).items()}
        mask = at["mask"]
        off = torch.where(mask, 0.0, junk)  # added, so that gradients pass
        logprobs = logits.log_softmax(-1)[at["contexts"], at["tokens"]]
        old = logprobs.detach() + at["noise"]
        extra = (values[at["contexts"]] + off, at["old_values"], at["targets"])
        loss, metrics = module.compute_loss(
            logprobs + off, old, at["advantages"], mask, at["weights"], at["scale"] + off, options,
            *(extra if module is ppo else ()),
        )  # fmt: skip
        loss.backward()
        for key, value in {"loss": loss.item(), **metrics}.items():
            totals[key] = totals.get(key, 0.0) + value
    numbers = {key: torch.tensor(value, dtype=torch.float64) for key, value in totals.items()}
    return numbers | {"logits": logits.grad, "values": values.grad if module is ppo else values * 0}


def credit(name, tensors):
    module, options = CREDITS[name]
    arguments = "rewards mask mask turn_ids group_ids values".split()
    return module.compute_advantages(*(tensors[x] for x in arguments), 0.5, options)[0]


def episodes():
    """What is paid to 8 rollouts of three groups, of one to three turns."""
    known, generator = draw(), torch.Generator().manual_seed(1)
    turn_ids = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 2, 2], [0] * 6, [0, 0, 0, 0, 1, 1]])
    return {
        "mask": known["mask"],
        "rewards": torch.randn(known["mask"].shape, generator=generator),
        "values": known["old_values"],
        "turn_ids": turn_ids.repeat(2, 1),
        "group_ids": torch.tensor([0, 1, 0, 1, 0, 0, 1, 2]),
    }


def same(got, want):
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_parts_of_a_step_add_up_to_its_gradient(name, split):
    got, want = step(name, draw(), SPLITS[split]), step(name, draw())
    same(got, want)
    assert want["logits"].abs().max() > 0.01


@pytest.mark.parametrize("name", LOSSES)
def test_padding_changes_neither_loss_nor_gradient(name):
    same(step(name, padded(draw())), step(name, draw()))


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_never_matter_to_loss_or_gradient(name, junk):
    names = ["noise", "advantages", "weights", "old_values", "targets"]
    same(step(name, spoilt(draw(), junk, names), junk=junk), step(name, draw()))


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_mask_gives_zero_loss_and_gradient(name):
    known = draw()
    known["mask"][:] = False
    assert all((x == 0).all() for x in step(name, known).values())


@pytest.mark.parametrize("name", LOSSES)
def test_the_first_step_has_the_policy_gradient(name):
    """Where π is what sampled, whatever is clipped: ∂L/∂log π = -w A · scale."""
    module, options = LOSSES[name]
    known = draw()
    old, mask = known["noise"], known["mask"]
    logprobs = old.clone().requires_grad_()
    # the same over a rollout, which is where GSPO's ratio is the same
    advantages, weights, scale = (
        known[x][:, :1].expand_as(old) for x in ("advantages", "weights", "weights")
    )
    extra = (known["old_values"],) * 3 if module is ppo else ()
    loss, _ = module.compute_loss(logprobs, old, advantages, mask, weights, scale, options, *extra)
    loss.backward()
    same(logprobs.grad, -weights * advantages * scale * mask)


@pytest.mark.parametrize("name", CREDITS)
def test_padding_does_not_change_advantages(name):
    plain, wide = episodes(), padded(episodes())
    got = credit(name, wide)
    same(got[wide["mask"]], credit(name, plain)[plain["mask"]])
    assert (got[~wide["mask"]] == 0).all() and (got != 0).any()


@pytest.mark.parametrize("name", CREDITS)
def test_the_order_of_rollouts_does_not_change_advantages_nor_do_the_names_of_groups(name):
    order = torch.tensor([5, 0, 7, 2, 1, 6, 4, 3])
    shuffled = {key: x[order] for key, x in episodes().items()}
    shuffled["group_ids"] = 9 - 3 * shuffled["group_ids"]
    same(credit(name, shuffled), credit(name, episodes())[order])


@pytest.mark.parametrize("junk", [5.0, *JUNK])
@pytest.mark.parametrize("name", CREDITS)
def test_masked_tokens_never_matter_to_advantages(name, junk):
    same(credit(name, spoilt(episodes(), junk, ["rewards", "values"])), credit(name, episodes()))


@pytest.mark.parametrize("name", [x for x in CREDITS if x != "ppo"])
def test_all_tokens_of_a_turn_have_the_same_advantage(name):
    tensors = episodes()
    got = credit(name, tensors)
    for row, mask, turns in zip(got, tensors["mask"], tensors["turn_ids"], strict=True):
        for turn in range(3):
            assert len(row[mask & (turns == turn)].unique()) <= 1
