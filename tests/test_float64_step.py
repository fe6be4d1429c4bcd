"""Whole updates, compared with float64 loops written from the equations.

The reference shares no code with the project: plain forwards of the Hugging Face model, one per
turn, and Python loops over tokens. An update has two gradient steps. The first is taken by the
weights that sampled; before the second both sides get other weights, so that the policy ratio
differs from 1.
"""

import math
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from conftest import load_small, save_small
from single_update import gradients_of_update, moved
from transformers import AutoModelForCausalLM

import train
from algorithms import grpo, ppo, reinforce
from algorithms.variants import sdpo
from core import config
from core.policy import Policy
from core.types import Rollout, Turn

MAX_TOKENS = 6  # --max-tokens
PROMPTS = [[65, 66, 67, 68], [70] * 9, [80, 81]]
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
    **{f"sdpo, {kind}": {
        "algo": "sdpo", "options": sdpo.Options(**CLIPS, coef=0.5, kind=kind),
        "temperature": 0.7, "tis_cap": 1.2, "mask_truncated_completions": True,
    } for kind in ("forward", "reverse", "jsd")},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small("Qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def models(folder):
    """In float64: of the weights that sampled, those that take the second step, the reference's."""
    models = {name: AutoModelForCausalLM.from_pretrained(folder) for name in ("old", "new", "ref")}
    generator = torch.Generator().manual_seed(0)
    for name, distance in (("new", 0.03), ("ref", 0.02)):
        models[name].load_state_dict(moved(models["old"].state_dict(), distance, generator))
    return {name: model.double() for name, model in models.items()}


def draw_rollouts(model, temperature):
    """Random tokens, one or two turns, most of them with feedback; the sampler's log-probs are near
    those of the policy."""
    draw, rollouts = random.Random(0), []
    for group in (0, 0, 0, 1, 1, 1, 2, 2):
        context, turns = PROMPTS[group], []
        for _ in range(draw.randint(1, 2)):
            ids = [draw.randrange(256) for _ in range(draw.randint(1, MAX_TOKENS))]
            rows = predicted(model, context, ids, temperature)
            sampler = [row[x].item() + draw.uniform(-0.4, 0.4) for row, _, x in rows]
            reason = "length" if len(ids) == MAX_TOKENS or draw.random() < 0.2 else "stop"
            feedback = [draw.randrange(256) for _ in range(9)] * (draw.random() < 0.7)
            reward = draw.choice([0.0, 0.0, 0.5, 1.0])
            turns.append(Turn(context, ids, sampler, reason, reward, feedback_ids=feedback))
            context = context + ids + [draw.randrange(256) for _ in range(2)]
        rollouts.append(Rollout("test", "player", group, group, turns=turns))
    return rollouts


def predicted(model, context, ids, temperature):
    """Of each token: the log-probs of all that may stand there, the hidden state, and the token."""
    out = model(torch.tensor([context + ids]), output_hidden_states=True)
    rows = range(len(context) - 1, len(context) + len(ids) - 1)
    logits = out.logits[0, rows] / temperature
    all_logprobs = logits - logits.logsumexp(-1, keepdim=True)
    return zip(all_logprobs, out.hidden_states[-1][0, rows], ids, strict=True)


def score(cfg, model, rollouts, head=None):
    """All tokens, rollout after rollout, and what the model says of each."""
    tokens = []
    for r, rollout in enumerate(rollouts):
        for k, turn in enumerate(rollout.turns):
            ids, teacher = turn.completion_ids, []
            if turn.feedback_ids and cfg.algo == "sdpo":
                shown = predicted(model, turn.feedback_ids, ids, cfg.temperature)
                teacher = [row.exp().detach() for row, *_ in shown]
            rows = predicted(model, turn.prompt_ids, ids, cfg.temperature)
            for t, (row, hidden, x) in enumerate(rows):
                tokens.append(SimpleNamespace(
                    rollout=r, turn=k, group=rollout.group_id, logp=row[x], p=row.exp(),
                    sampler=turn.sampler_logprobs[t], reward=turn.reward * (t == len(ids) - 1),
                    kept=not (cfg.mask_truncated_completions and turn.finish_reason == "length"),
                    value=head and hidden @ head[0][0] + head[1][0],
                    teacher=teacher[t] if teacher else None,
                ))  # fmt: skip
    return tokens


def mean(values):
    return sum(values) / len(values)


def estimate(d, kind):
    return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[kind]


def kl(p, q):
    return (p * (p / q).log()).sum()


def divergence(p, q, kind):
    """Of the policy p and its teacher q."""
    m = (p + q) / 2
    return {"forward": kl(q, p), "reverse": kl(p, q), "jsd": (kl(p, m) + kl(q, m)) / 2}[kind]


def compared_advantages(cfg, tokens):
    """The return minus the mean of the group, with GRPO over the standard deviation."""
    by_turn = cfg.credit == "turn"
    returns = defaultdict(float)  # by (group, turn), rollout
    for x in tokens:
        for k in range(x.turn + 1) if by_turn else [0]:
            returns[x.group, k, x.rollout] += cfg.gamma ** (x.turn - k) * x.reward
    advantages = []
    for x in tokens:
        k = x.turn if by_turn else 0
        peers = [value for key, value in returns.items() if key[:2] == (x.group, k)]
        std = (sum((y - mean(peers)) ** 2 for y in peers) / max(1, len(peers) - 1)) ** 0.5
        centered = returns[x.group, k, x.rollout] - mean(peers)
        advantages.append(centered / (1.0 if cfg.algo == "reinforce" else std + 1e-4))
    return advantages, None


def gae(cfg, tokens):
    """A_t = δ_t + γλ A_{t+1}; after the last token both value and advantage are 0. Normalized; and
    the targets of the values."""
    raw, later, following = [], 0.0, None
    for x in reversed(tokens):
        if following is None or following.rollout != x.rollout:
            later, next_value, gamma = 0.0, 0.0, 0.0
        else:
            next_value = following.value.item()
            gamma = 1.0 if following.turn == x.turn else cfg.gamma
        delta = x.reward + gamma * next_value - x.value.item()
        later, following = delta + gamma * cfg.options.gae_lambda * later, x
        raw.insert(0, later)
    targets = [a + x.value.item() for a, x in zip(raw, tokens, strict=True)]
    std = mean([(a - mean(raw)) ** 2 for a in raw]) ** 0.5
    return [(a - mean(raw)) / (std + 1e-4) for a in raw], targets


def importance_weight(cfg, x, old):
    same = [y for y in old if y.rollout == x.rollout] if cfg.tis_level == "product" else [x]
    w = math.exp(sum(y.logp.item() - y.sampler for y in same))
    if cfg.tis_cap == 0:
        return 1.0
    if cfg.tis_mode == "mask":
        return w if 1 / cfg.tis_cap <= w <= cfg.tis_cap else 0.0
    return min(w, cfg.tis_cap)


def loss_of(cfg, new, old, ref, advantages, targets):
    """The loss of one gradient step, as a float64 tensor."""
    options, loss = cfg.options, torch.zeros((), dtype=torch.float64)
    for i, (x, before, a) in enumerate(zip(new, old, advantages, strict=True)):
        if not x.kept:
            continue
        scale = 1 / sum(y.kept for y in new)
        if options.aggregation == "sequence":
            of_rollout = sum(y.kept for y in new if y.rollout == x.rollout)
            scale = 1 / (8 * of_rollout)
        w, ratio = importance_weight(cfg, before, old), (x.logp - before.logp).exp()
        if cfg.algo == "reinforce":
            term = ratio.detach() * a * x.logp
        else:
            low, high = (options.clip,) * 2 if cfg.algo == "ppo" else CLIPS.values()
            term = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
        loss = loss - scale * w * term
        if x.teacher is not None:
            d = divergence(x.p, x.teacher, options.kind)
            loss = loss + options.coef * scale * w * ratio.detach() * d
        if cfg.entropy_coef:
            entropy = -(x.p * x.p.log()).sum()
            loss = loss - cfg.entropy_coef * scale * w * ratio.detach() * entropy
        if cfg.kl_coef:
            rho = ratio.detach() if cfg.kl_estimator == "k2" else ratio
            k = estimate(x.logp - ref[i].logp, cfg.kl_estimator)
            loss = loss + cfg.kl_coef * scale * w * rho * k
        if targets:
            change = (x.value - before.value).clamp(-options.value_clip, options.value_clip)
            errors = (x.value - targets[i]) ** 2, (before.value + change - targets[i]) ** 2
            loss = loss + scale * options.value_coef * torch.maximum(*errors) / 2
    return loss


def reference_gradients(cfg, rollouts, models, head):
    """The gradient of each of the two steps, flat; weights by name, then those of the head. And the
    loss and the mean divergence of the second."""
    with torch.no_grad():
        old = score(cfg, models["old"], rollouts, head)
        ref = score(cfg, models["ref"], rollouts)
    advantages, targets = (gae if cfg.algo == "ppo" else compared_advantages)(cfg, old)
    gradients = []
    for name in ("old", "new"):
        new = score(cfg, models[name], rollouts, head)
        loss = loss_of(cfg, new, old, ref, advantages, targets)
        trained = [p for _, p in sorted(models[name].named_parameters())] + list(head or ())
        parts = torch.autograd.grad(loss, trained, materialize_grads=True)
        gradients.append(torch.cat([g.flatten() for g in parts]))
    kept = [x for x in new if x.kept]
    taught = [x for x in kept if x.teacher is not None]
    apart = sum(divergence(x.p, x.teacher, cfg.options.kind).item() for x in taught)
    return gradients, loss.item(), apart / len(kept)


@pytest.mark.parametrize("name", SETTINGS)
def test_both_gradients_of_an_update_equal_float64_loops(name, folder, models, monkeypatch):
    cfg = config.resolve(train.Config(
        num_epochs=2, max_grad_norm=0.0, max_tokens=MAX_TOKENS, num_prompts=3, group_size=4,
        **SETTINGS[name],
    ))  # fmt: skip
    config.validate(cfg)
    rollouts, head = draw_rollouts(models["old"], cfg.temperature), None
    policy = load_small(folder, value_head=cfg.algo == "ppo")
    policy.micro_batch_tokens = 60
    monkeypatch.setattr(Policy, "logits_chunk", 3)
    if cfg.algo == "ppo":
        generator = torch.Generator().manual_seed(0)
        head = [0.3 * torch.randn(shape, generator=generator) for shape in ((1, 32), (1,))]
        policy.value_head.load_state_dict(dict(zip(("weight", "bias"), head, strict=True)))
        head = [x.double().requires_grad_() for x in head]
    later, reference = (models[name].state_dict() for name in ("new", "ref"))
    reference = reference if cfg.kl_coef else None
    ours, metrics = gradients_of_update(cfg, policy, rollouts, later, reference)
    theirs, loss, apart = reference_gradients(cfg, rollouts, models, head)
    assert len(ours) == 2 and metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-4)
    assert metrics.get("sdpo/divergence", 0.0) == pytest.approx(apart, rel=1e-4)
    assert (apart > 0) == (cfg.algo == "sdpo")
    for mine, other in zip(ours, theirs, strict=True):
        assert other.norm() > 1e-4
        assert (mine - other).norm() < TOLERANCE * other.norm()
