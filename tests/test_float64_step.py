"""Whole updates, compared with float64 loops written from the equations.

The reference shares no code with the project: plain forwards of the Hugging Face model, one per
turn, and Python loops over rollouts, turns and tokens. An update has two gradient steps. The first
is taken by the weights that sampled; before the second both sides get other weights, so that the
policy ratio differs from 1.
"""

import math
import random

import pytest
import torch
from conftest import load_small, save_small
from single_update import gradients_of_update, moved
from transformers import AutoModelForCausalLM

import train
from algorithms import grpo, ppo, reinforce
from core import config
from core.types import Rollout, Turn

MAX_TOKENS = 6  # --max-tokens
PROMPTS = [[65, 66, 67, 68], [70] * 9, [80, 81]]
GROUP_SIZES = [3, 3, 2]
TOLERANCE = 2e-5  # of the norm of the gradient; float32 against float64
CLIPS = {"clip_low": 0.1, "clip_high": 0.15}
SETTINGS = {
    "grpo, its KL in the loss, an entropy bonus, truncated tokens": {
        "algo": "grpo", "options": grpo.Options(**CLIPS, aggregation="token"),
        "temperature": 0.7, "entropy_coef": 0.05, "kl_coef": 0.1, "tis_cap": 1.2,
        "tis_mode": "mask", "mask_truncated_completions": True,
    },
    "grpo by turn, with weights of sequences": {
        "algo": "grpo", "options": grpo.Options(**CLIPS, aggregation="sequence"),
        "credit": "turn", "gamma": 0.9,
        "tis_cap": 1.2, "tis_level": "product",
    },
    "reinforce, the KL as k1": {
        "algo": "reinforce", "options": reinforce.Options(baseline="group"),
        "gamma": 0.9, "kl_coef": 0.1, "kl_estimator": "k1", "tis_cap": 0.0,
    },
    "ppo": {
        "algo": "ppo", "options": ppo.Options(gae_lambda=0.9, clip=0.1, value_clip=0.1),
        "credit": "turn", "gamma": 0.9, "kl_coef": 0.1, "kl_estimator": "k3",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small("Qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def states(folder):
    """The weights that sampled, those that take the second step, and those of the reference."""
    old = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    generator = torch.Generator().manual_seed(0)
    return {
        "old": old,
        "new": moved(old, 0.03, generator),
        "reference": moved(old, 0.02, generator),
    }


@pytest.fixture(scope="module")
def models(folder, states):
    """The same in float64."""
    found = {name: AutoModelForCausalLM.from_pretrained(folder).double() for name in states}
    for name, model in found.items():
        model.load_state_dict(states[name])
    return found


def draw_rollouts(models, temperature):
    """Random tokens, one or two turns; the sampler's log-probs are near those of the policy."""
    draw, rollouts = random.Random(0), []
    for group, (prompt, size) in enumerate(zip(PROMPTS, GROUP_SIZES, strict=True)):
        for _ in range(size):
            context, turns = list(prompt), []
            for _ in range(draw.randint(1, 2)):
                ids = [draw.randrange(256) for _ in range(draw.randint(1, MAX_TOKENS))]
                with torch.no_grad():
                    exact = logprobs_of(models["old"], context, ids, temperature)[0].tolist()
                sampler = [x + draw.uniform(-0.4, 0.4) for x in exact]
                reason = "length" if len(ids) == MAX_TOKENS or draw.random() < 0.2 else "stop"
                reward = draw.choice([0.0, 0.0, 0.5, 1.0])
                turns.append(Turn(context, ids, sampler, reason, reward))
                context = context + ids + [draw.randrange(256) for _ in range(2)]
            rollouts.append(Rollout("test", "player", group, group, turns=turns))
    return rollouts


# --- The reference: float64 loops ---------------------------------------------------------------


def logprobs_of(model, context, ids, temperature):
    """Log-probs and entropies of one completion, and the hidden states that predict its tokens."""
    out = model(torch.tensor([context + ids]), output_hidden_states=True)
    rows = range(len(context) - 1, len(context) + len(ids) - 1)
    logits = out.logits[0, rows] / temperature
    logps = logits - logits.logsumexp(-1, keepdim=True)
    entropy = -(logps.exp() * logps).sum(-1)
    picked = torch.stack([row[token] for row, token in zip(logps, ids, strict=True)])
    return picked, entropy, out.hidden_states[-1][0, rows]


def score(model, rollouts, temperature, head=None):
    """For each rollout its tokens, in order, as dicts."""
    scored = []
    for rollout in rollouts:
        tokens = []
        for k, turn in enumerate(rollout.turns):
            ids = turn.completion_ids
            logps, entropy, hidden = logprobs_of(model, turn.prompt_ids, ids, temperature)
            for t in range(len(ids)):
                value = hidden[t] @ head[0][0] + head[1][0] if head else None
                tokens.append({"turn": k, "logp": logps[t], "entropy": entropy[t], "value": value})
        scored.append(tokens)
    return scored


def estimate(d, kind):
    return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[kind]


def rewards_of(rollout):
    """The reward of each token."""
    rewards = []
    for turn in rollout.turns:
        rewards += [0.0] * (len(turn.completion_ids) - 1) + [turn.reward]
    return rewards


def mean(values):
    return sum(values) / len(values)


def returns_of(cfg, rewards, tokens):
    """{turn: return}: with credit by episode there is one, of turn 0."""
    by_turn = {}
    for token, reward in zip(tokens, rewards, strict=True):
        by_turn[token["turn"]] = by_turn.get(token["turn"], 0.0) + reward
    if cfg.credit == "episode":
        return {0: sum(cfg.gamma**k * r for k, r in by_turn.items())}
    return {k: sum(cfg.gamma ** (j - k) * r for j, r in by_turn.items() if j >= k) for k in by_turn}


def compared_advantages(cfg, rollouts, returns):
    """{turn: advantage} of each rollout: the return minus the mean of the group, with GRPO over the
    standard deviation."""
    found = []
    for rollout, own in zip(rollouts, returns, strict=True):
        peers = [
            r for r, x in zip(returns, rollouts, strict=True) if x.group_id == rollout.group_id
        ]
        advantages = {}
        for k in own:
            group = [r[k] for r in peers if k in r]
            m = mean(group)
            std = (sum((x - m) ** 2 for x in group) / max(1, len(group) - 1)) ** 0.5
            advantages[k] = (own[k] - m) / (1.0 if cfg.algo == "reinforce" else std + 1e-4)
        found.append(advantages)
    return found


def gae(cfg, rewards, tokens):
    """A_t = δ_t + γλ A_{t+1}; after the last token both value and advantage are 0."""
    advantages, later, next_value, next_turn = [0.0] * len(tokens), 0.0, 0.0, None
    for t in reversed(range(len(tokens))):
        gamma = 1.0 if tokens[t]["turn"] == next_turn else cfg.gamma
        value = tokens[t]["value"].item()
        later = rewards[t] + gamma * next_value - value + gamma * cfg.options.gae_lambda * later
        advantages[t], next_value, next_turn = later, value, tokens[t]["turn"]
    return advantages


def advantages_and_targets(cfg, rollouts, rewards, old):
    """Of each token of each rollout."""
    if cfg.algo != "ppo":
        returns = [returns_of(cfg, r, o) for r, o in zip(rewards, old, strict=True)]
        by_turn = compared_advantages(cfg, rollouts, returns)
        turn_of = (lambda token: 0) if cfg.credit == "episode" else (lambda token: token["turn"])
        return [[turns[turn_of(token)] for token in tokens]
                for turns, tokens in zip(by_turn, old, strict=True)], None  # fmt: skip
    raw = [gae(cfg, r, o) for r, o in zip(rewards, old, strict=True)]
    targets = [[a + token["value"].item() for a, token in zip(row, o, strict=True)]
               for row, o in zip(raw, old, strict=True)]  # fmt: skip
    flat = [a for row in raw for a in row]
    std = mean([(x - mean(flat)) ** 2 for x in flat]) ** 0.5
    return [[(a - mean(flat)) / (std + 1e-4) for a in row] for row in raw], targets


def loss_of(cfg, rollouts, new, old, ref, advantages, targets):
    """The loss of one gradient step, as a float64 tensor."""
    options = cfg.options
    kept = [
        [not (cfg.mask_truncated_completions and turn.finish_reason == "length")
         for turn in rollout.turns for _ in turn.completion_ids]
        for rollout in rollouts
    ]  # fmt: skip
    loss = torch.zeros((), dtype=torch.float64)
    for i, rollout in enumerate(rollouts):
        sampler = [x for turn in rollout.turns for x in turn.sampler_logprobs]
        gaps = [o["logp"].item() - s for o, s in zip(old[i], sampler, strict=True)]
        for t in (t for t, keep in enumerate(kept[i]) if keep):
            scale = 1 / sum(map(sum, kept))
            if options.aggregation == "sequence":
                scale = 1 / (len(rollouts) * sum(kept[i]))
            w = math.exp(sum(gaps) if cfg.tis_level == "product" else gaps[t])
            if cfg.tis_cap == 0:
                w = 1.0
            elif cfg.tis_mode == "mask":
                w = w if 1 / cfg.tis_cap <= w <= cfg.tis_cap else 0.0
            else:
                w = min(w, cfg.tis_cap)
            a, logp = advantages[i][t], new[i][t]["logp"]
            ratio = (logp - old[i][t]["logp"].detach()).exp()
            if cfg.algo == "reinforce":
                term = ratio.detach() * a * logp
            else:
                low, high = (options.clip,) * 2 if cfg.algo == "ppo" else CLIPS.values()
                term = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
            loss = loss - scale * w * term
            if cfg.entropy_coef:
                bonus = w * ratio.detach() * new[i][t]["entropy"]
                loss = loss - cfg.entropy_coef * scale * bonus
            if cfg.kl_coef:
                d = logp - ref[i][t]["logp"].detach()
                rho = ratio.detach() if cfg.kl_estimator == "k2" else ratio
                loss = loss + cfg.kl_coef * scale * w * rho * estimate(d, cfg.kl_estimator)
            if targets:
                v, v_old = new[i][t]["value"], old[i][t]["value"].item()
                change = (v - v_old).clamp(-options.value_clip, options.value_clip)
                error = torch.maximum((v - targets[i][t]) ** 2,
                                      (v_old + change - targets[i][t]) ** 2)  # fmt: skip
                loss = loss + scale * options.value_coef * error / 2
    return loss


def reference_gradients(cfg, rollouts, models, head):
    """The gradient of each of the two steps, flat; weights by name, then those of the head. And the
    loss of the second."""
    with torch.no_grad():
        old = score(models["old"], rollouts, cfg.temperature, head)
        ref = score(models["reference"], rollouts, cfg.temperature)
    rewards = [*map(rewards_of, rollouts)]
    advantages, targets = advantages_and_targets(cfg, rollouts, rewards, old)
    gradients = []
    for name in ("old", "new"):
        new = score(models[name], rollouts, cfg.temperature, head)
        loss = loss_of(cfg, rollouts, new, old, ref, advantages, targets)
        trained = [p for _, p in sorted(models[name].named_parameters())] + list(head or ())
        found = torch.autograd.grad(loss, trained, materialize_grads=True)
        gradients.append(torch.cat([g.flatten() for g in found]))
    return gradients, loss.item()


# --- Ours ---------------------------------------------------------------------------------------


def our_gradients(cfg, rollouts, folder, states, head):
    policy = load_small(folder, value_head=cfg.algo == "ppo")
    policy.micro_batch_tokens = 60
    if head:
        with torch.no_grad():
            policy.value_head.weight.copy_(head[0])
            policy.value_head.bias.copy_(head[1])
    policy.model.load_state_dict(states["old"])
    reference = states["reference"] if cfg.kl_coef else None
    gradients, metrics = gradients_of_update(cfg, policy, rollouts, states["new"], reference)
    return gradients, metrics["loss"]


@pytest.mark.parametrize("name", SETTINGS)
def test_both_gradients_of_an_update_equal_float64_loops(name, folder, states, models):
    cfg = config.resolve(train.Config(
        num_epochs=2, max_grad_norm=0.0, max_tokens=MAX_TOKENS, num_prompts=3, group_size=4,
        **SETTINGS[name],
    ))  # fmt: skip
    config.validate(cfg)
    rollouts, head = draw_rollouts(models, cfg.temperature), None
    if cfg.algo == "ppo":
        generator = torch.Generator().manual_seed(0)
        head = tuple(
            (0.3 * torch.randn(shape, generator=generator)).double().requires_grad_()
            for shape in ((1, 32), (1,))
        )
    theirs, their_loss = reference_gradients(cfg, rollouts, models, head)
    ours, loss = our_gradients(cfg, rollouts, folder, states, head)
    assert len(ours) == 2 and loss == pytest.approx(their_loss, rel=1e-4, abs=1e-4)
    for mine, other in zip(ours, theirs, strict=True):
        assert other.norm() > 1e-4
        assert (mine - other).norm() < TOLERANCE * other.norm()
