"""Whole updates of random settings, compared with float64 loops written from the equations.

The reference shares no code with the project: plain forwards of the Hugging Face model, one per
turn, and Python loops over rollouts, turns and tokens. An update has two gradient steps. The first
is taken by the weights that sampled; before the second both sides get other weights, so that the
policy ratio differs from 1.
"""

import copy
import math
import random
from dataclasses import replace

import pytest
import torch
from conftest import load_small, save_small
from single_update import single_update
from transformers import AutoModelForCausalLM

import train
from algorithms import grpo, ppo, reinforce
from algorithms.variants import cispo, clip_cov, dppo, gdpo, gspo, kl_cov
from core import config
from core.optimizer import make_optimizer
from core.types import Rollout, Turn

ALGOS = """grpo reinforce gspo ppo grpo reinforce cispo ppo kl_cov reinforce clip_cov ppo grpo
    reinforce dppo gdpo""".split()
CONFIGS, FAST = 48, len(ALGOS)  # random settings in all; those that are not marked slow
MAX_TOKENS = 6  # --max-tokens
PROMPTS = [[65, 66, 67, 68], [70] * 9, [80, 81]]
GROUP_SIZES = [3, 3, 2]
TOLERANCE = 2e-5  # of the norm of the gradient; float32 against float64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def weights(folder):
    """Three float64 models: that sampled, that takes the second step, and the reference."""
    sampled = AutoModelForCausalLM.from_pretrained(folder).double()
    generator = torch.Generator().manual_seed(0)
    models = {"old": sampled}
    for name, distance in (("new", 0.03), ("reference", 0.02)):
        models[name] = copy.deepcopy(sampled)
        with torch.no_grad():
            for p in models[name].parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.copy_((p + distance * noise).float())  # the same in float32
    return models


def draw_settings(seed):
    """Random settings of a valid update with two epochs."""
    draw = random.Random(seed)
    algo = ALGOS[seed % FAST]
    number = ALGOS[: seed % FAST].count(algo)  # of those before it, so that every variant comes
    credit = "turn" if algo == "ppo" else draw.choice(["episode", "turn"])
    options = {
        "gamma": draw.choice([1.0, 0.9]),
        "reward_coef": draw.choice([1.0, 0.5]),
        "temperature": draw.choice([1.0, 0.7]),
        "entropy_coef": draw.choice([0.0, 0.05]),
        "tis_cap": draw.choice([0.0, 1.2, 2.0]),
        "overlong_buffer": draw.choice([0, 3]),
        "mask_truncated_completions": draw.choice([False, True]),
    }
    if options["tis_cap"]:
        options["tis_level"] = draw.choice(["token", "geometric", "product"])
        options["tis_mode"] = draw.choice(["truncate", "mask"])
    if draw.random() < 0.6:
        options |= {"kl_coef": 0.1, "kl_estimator": draw.choice(["k1", "k2", "k3"])}
    scale = draw.choice(["group", "batch", "none"])
    has_spread = algo not in ("reinforce", "ppo") and scale != "none"  # its KL may be no reward
    if options.get("kl_coef") and draw.random() < 0.5 and not has_spread:
        options["kl_in"] = "reward"
    if algo == "gdpo":  # what changes the return of an episode, or its parts by turn, is refused
        credit = "episode"
        options |= {"gamma": 1.0, "overlong_buffer": 0}
        options.pop("kl_in", None)
    like_grpo = {
        "scale_rewards": scale,
        "aggregation": draw.choice([None, "token", "sequence", "prompt", "constant"]),
    }
    loss_type = list(grpo.LOSS_TYPES)[number % 4]
    clip = draw.choice([None, 0.1])
    chosen = {
        "grpo": lambda: grpo.Options(loss_type, clip_low=clip, **like_grpo),
        "gspo": lambda: gspo.Options(scale_rewards=scale),
        "cispo": lambda: cispo.Options(("cispo", "scalerl")[number % 2], **like_grpo),
        # about 1 in 256 is the probability of a token
        "dppo": lambda: dppo.Options(
            limit=draw.choice([0.0, 3e-4, 1e-3]),
            **like_grpo | {"aggregation": like_grpo["aggregation"] or "token"},
        ),
        "gdpo": lambda: gdpo.Options(
            clip_low=clip or 0.2, aggregation=like_grpo["aggregation"] or "token"
        ),
        "kl_cov": lambda: kl_cov.Options(
            loss_type, fraction=draw.choice([0.1, 0.4]), coef=0.7, **like_grpo
        ),
        # all tokens within the range: no random choice
        "clip_cov": lambda: clip_cov.Options(
            loss_type, fraction=1.0, low=0.05, high=0.3, **like_grpo
        ),
        "reinforce": lambda: reinforce.Options(
            baseline=("batch", "group", "leave_one_out", "none")[number % 4],
            normalize=draw.choice([False, True]),
        ),
        "ppo": lambda: ppo.Options(
            gae_lambda=draw.choice([0.0, 0.9, 1.0]),
            clip=draw.choice([0.1, 0.2]),
            value_clip=draw.choice([0.0, 0.1]),
            value_coef=draw.choice([0.5, 1.0]),
        ),
    }[algo]()
    cfg = train.Config(
        algo=algo, credit=credit, num_epochs=2, max_grad_norm=0.0, max_tokens=MAX_TOKENS,
        num_prompts=3, group_size=4, options=chosen, **options,
    )  # fmt: skip
    cfg = config.resolve(cfg)
    config.validate(cfg)
    return cfg


def draw_rollouts(seed, models, temperature):
    """Random tokens, one or two turns; the sampler's log-probs are near those of the policy."""
    draw, draw_parts, rollouts = random.Random(1000 + seed), random.Random(2000 + seed), []
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
            info = {"reward_a": draw_parts.choice([0, 1, None]), "weight_b": 0.3,
                    "reward_b": draw_parts.choice([0.0, 0.1, 0.3])}  # fmt: skip
            rollouts.append(Rollout("test", "player", group, group, turns=turns, info=info))
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
            logps, entropy, hidden = logprobs_of(
                model, turn.prompt_ids, turn.completion_ids, temperature
            )
            for t in range(len(turn.completion_ids)):
                value = hidden[t] @ head[0][0] + head[1][0] if head else None
                tokens.append({"turn": k, "logp": logps[t], "entropy": entropy[t], "value": value})
        scored.append(tokens)
    return scored


def rewards_of(cfg, rollout, old, ref):
    """The reward of each token."""
    rewards, i = [], 0
    for turn in rollout.turns:
        length = len(turn.completion_ids)
        for t in range(length):
            reward = 0.0
            if t == length - 1:
                reward += cfg.reward_coef * turn.reward
                if cfg.overlong_buffer:
                    over = (length - (MAX_TOKENS - cfg.overlong_buffer)) / cfg.overlong_buffer
                    reward -= min(1.0, max(0.0, over))
            if cfg.kl_coef and cfg.kl_in == "reward":
                d = (old[i]["logp"] - ref[i]["logp"]).item()
                reward -= cfg.kl_coef * estimate(d, cfg.kl_estimator)
            rewards.append(reward)
            i += 1
    return rewards


def estimate(d, kind):
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    return (torch.exp(torch.tensor(-d, dtype=torch.float64)).item() if isinstance(d, float)
            else (-d).exp()) - 1 + d  # fmt: skip


def in_loss(cfg, rollouts):
    """Whether each token is in the loss."""
    return [
        [
            not (cfg.mask_truncated_completions and turn.finish_reason == "length")
            for turn in rollout.turns
            for _ in turn.completion_ids
        ]
        for rollout in rollouts
    ]


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
    """{turn: advantage} of each rollout, for REINFORCE and GRPO."""
    found = []
    for i, rollout in enumerate(rollouts):
        advantages = {}
        for k, own in returns[i].items():
            peers = [j for j, r in enumerate(rollouts) if r.group_id == rollout.group_id]
            group = [returns[j][k] for j in peers if k in returns[j]]
            others = [returns[j][k] for j in peers if k in returns[j] and j != i]
            batch = [r[k] for r in returns if k in r]
            if cfg.algo == "reinforce":
                baseline = {
                    "batch": mean(batch), "group": mean(group), "none": 0.0,
                    "leave_one_out": mean(others) if others else own,
                }[cfg.options.baseline]  # fmt: skip
                advantages[k] = own - baseline
            else:
                scaled = {"group": group, "batch": batch}.get(cfg.options.scale_rewards)
                advantages[k] = own - mean(group)
                if scaled is not None:
                    m = mean(scaled)
                    std = (sum((x - m) ** 2 for x in scaled) / max(1, len(scaled) - 1)) ** 0.5
                    advantages[k] /= std + 1e-4
        found.append(advantages)
    return found


def decoupled_advantages(cfg, rollouts):
    """The advantage of each rollout, for GDPO."""
    sums = [0.0] * len(rollouts)
    for name, weight in (("reward_a", 1.0), ("reward_b", 0.3)):
        for i, rollout in enumerate(rollouts):
            group = [r.info[name] for r in rollouts if r.group_id == rollout.group_id]
            group = [cfg.reward_coef * x for x in group if x is not None]
            if rollout.info[name] is None:
                continue
            m = mean(group)
            std = (sum((x - m) ** 2 for x in group) / max(1, len(group) - 1)) ** 0.5
            sums[i] += weight * (cfg.reward_coef * rollout.info[name] - m) / (std + 1e-4)
    m = mean(sums)
    std = (sum((x - m) ** 2 for x in sums) / (len(sums) - 1)) ** 0.5
    return [(x - m) / (std + 1e-4) for x in sums]


def normalized(advantages, kept):
    """Mean 0 and standard deviation 1 over the kept tokens."""
    flat = [a for row, keep in zip(advantages, kept, strict=True)
            for a, k in zip(row, keep, strict=True) if k]  # fmt: skip
    m = mean(flat)
    std = mean([(x - m) ** 2 for x in flat]) ** 0.5
    return [[(a - m) / (std + 1e-4) for a in row] for row in advantages]


def gae(cfg, rewards, tokens):
    """A_t = δ_t + γλ A_{t+1}; after the last token both value and advantage are 0."""
    advantages, later, next_value, next_turn = [0.0] * len(tokens), 0.0, 0.0, None
    for t in reversed(range(len(tokens))):
        gamma = 1.0 if tokens[t]["turn"] == next_turn else cfg.gamma
        value = tokens[t]["value"].item()
        later = rewards[t] + gamma * next_value - value + gamma * cfg.options.gae_lambda * later
        advantages[t], next_value, next_turn = later, value, tokens[t]["turn"]
    return advantages


def chosen_by_covariance(cfg, old, kept, advantages):
    """The places (i, t) of the tokens of Clip-Cov, and of those of KL-Cov."""
    places = [(i, t) for i, row in enumerate(kept) for t, keep in enumerate(row) if keep]
    logps = {(i, t): old[i][t]["logp"].item() for i, t in places}
    m, a = mean(logps.values()), mean([advantages[i][t] for i, t in places])
    cov = {(i, t): (logps[i, t] - m) * (advantages[i][t] - a) for i, t in places}
    if cfg.algo == "clip_cov":
        return {p for p in places if cfg.options.low <= cov[p] <= cfg.options.high}, set()
    count = max(1, int(cfg.options.fraction * len(places)))
    return set(), set(sorted(places, key=lambda p: -cov[p])[:count])


def loss_of(cfg, rollouts, new, old, ref, kept, advantages, targets):
    """The loss of one gradient step, as a float64 tensor."""
    total_kept = sum(map(sum, kept))
    unrewarded, penalized = set(), set()
    if cfg.algo in ("clip_cov", "kl_cov"):
        unrewarded, penalized = chosen_by_covariance(cfg, old, kept, advantages)
    groups = [rollout.group_id for rollout in rollouts]
    loss = torch.zeros((), dtype=torch.float64)
    for i, rollout in enumerate(rollouts):
        sampler = [x for turn in rollout.turns for x in turn.sampler_logprobs]
        gaps = [o["logp"].item() - s for o, s in zip(old[i], sampler, strict=True)]
        logs = [n["logp"] - o["logp"].detach() for n, o in zip(new[i], old[i], strict=True)]
        counted = [x.item() for x, k in zip(logs, kept[i], strict=True) if k]
        for t, keep in enumerate(kept[i]):
            if not keep:
                continue
            scale = {
                "token": 1 / total_kept, "sequence": 1 / (len(rollouts) * sum(kept[i])),
                "prompt": 1 / (len(set(groups)) * sum(
                    sum(k) for k, g in zip(kept, groups, strict=True) if g == groups[i])),
                "constant": 1 / (len(rollouts) * MAX_TOKENS),
            }[cfg.options.aggregation]  # fmt: skip
            gap = {"token": gaps[t], "geometric": mean(gaps), "product": sum(gaps)}[cfg.tis_level]
            w = math.exp(gap)
            if cfg.tis_cap == 0:
                w = 1.0
            elif cfg.tis_mode == "mask":
                w = w if 1 / cfg.tis_cap <= w <= cfg.tis_cap else 0.0
            else:
                w = min(w, cfg.tis_cap)
            a, logp, token_ratio = advantages[i][t], new[i][t]["logp"], logs[t].exp()
            if (i, t) in unrewarded:
                a = 0.0
            if (i, t) in penalized:
                loss = loss + cfg.options.coef * scale * w * (token_ratio - 1 - logs[t])
            if cfg.algo == "reinforce":
                term = token_ratio.detach() * a * logp
            elif cfg.algo == "dppo":
                moved = (logp.exp() - (old[i][t]["logp"] - gaps[t]).exp()).item()
                further = abs(moved) > cfg.options.limit and moved * a > 0
                term = 0.0 if further else token_ratio * a
            else:
                options, ratio = cfg.options, token_ratio
                low = high = options.clip if cfg.algo == "ppo" else None
                if low is None:
                    low, high = options.clip_low, options.clip_high
                if cfg.algo == "gspo":
                    ratio = (mean(counted) + logs[t] - logs[t].detach()).exp()
                clipped = ratio.clamp(1 - low, 1 + high)
                if cfg.algo == "cispo":
                    term = clipped.detach() * a * logp
                else:
                    term = torch.minimum(ratio * a, clipped * a)
            loss = loss - scale * w * term
            if cfg.entropy_coef:
                bonus = w * token_ratio.detach() * new[i][t]["entropy"]
                loss = loss - cfg.entropy_coef * scale * bonus
            if cfg.kl_coef and cfg.kl_in == "loss":
                d = logp - ref[i][t]["logp"].detach()
                rho = token_ratio.detach() if cfg.kl_estimator == "k2" else token_ratio
                loss = loss + cfg.kl_coef * scale * w * rho * estimate(d, cfg.kl_estimator)
            if cfg.algo == "ppo":
                v, v_old = new[i][t]["value"], old[i][t]["value"].item()
                error = (v - targets[i][t]) ** 2
                if cfg.options.value_clip:
                    change = (v - v_old).clamp(-cfg.options.value_clip, cfg.options.value_clip)
                    error = torch.maximum(error, (v_old + change - targets[i][t]) ** 2)
                loss = loss + scale * cfg.options.value_coef * error / 2
    return loss


def reference_gradients(cfg, rollouts, models, head):
    """The gradient of each of the two steps, flat; weights by name, then those of the head. And the
    loss of the second."""
    with torch.no_grad():
        old = score(models["old"], rollouts, cfg.temperature, head)
        ref = score(models["reference"], rollouts, cfg.temperature)
    kept = in_loss(cfg, rollouts)
    rewards = [rewards_of(cfg, r, o, f) for r, o, f in zip(rollouts, old, ref, strict=True)]
    targets = None
    if cfg.algo == "ppo":
        raw = [gae(cfg, r, o) for r, o in zip(rewards, old, strict=True)]
        targets = [[a + token["value"].item() for a, token in zip(row, o, strict=True)]
                   for row, o in zip(raw, old, strict=True)]  # fmt: skip
        advantages = normalized(raw, kept)
    elif cfg.algo == "gdpo":
        found = decoupled_advantages(cfg, rollouts)
        advantages = [[a] * len(tokens) for a, tokens in zip(found, old, strict=True)]
    else:
        returns = [returns_of(cfg, r, o) for r, o in zip(rewards, old, strict=True)]
        by_turn = compared_advantages(cfg, rollouts, returns)
        advantages = [
            [turns[0 if cfg.credit == "episode" else token["turn"]] for token in tokens]
            for turns, tokens in zip(by_turn, old, strict=True)
        ]
        if cfg.algo == "reinforce" and cfg.options.normalize:
            advantages = normalized(advantages, kept)
    gradients = []
    for name in ("old", "new"):
        model = models[name]
        new = score(model, rollouts, cfg.temperature, head)
        loss = loss_of(cfg, rollouts, new, old, ref, kept, advantages, targets)
        trained = [p for _, p in sorted(model.named_parameters())] + list(head or ())
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        parts = [
            torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)
        ]
        gradients.append(torch.cat([g.flatten() for g in parts]))
    return gradients, loss.item()


# --- Ours ---------------------------------------------------------------------------------------


def our_gradients(cfg, rollouts, folder, models, head):
    policy = load_small(folder, value_head=cfg.algo == "ppo")
    policy.micro_batch_tokens = 60
    if head:
        with torch.no_grad():
            policy.value_head.weight.copy_(head[0])
            policy.value_head.bias.copy_(head[1])
    optimizer, gradients = make_optimizer(policy, 1e-3), []

    def load(name):
        policy.model.load_state_dict({k: v.float() for k, v in models[name].state_dict().items()})

    def step():
        named = sorted(policy.model.named_parameters())
        parameters = [p for _, p in named] + (list(policy.value_head.parameters()) if head else [])
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        gradients.append(torch.cat([g.flatten() for g in flat]).double())
        load("new")

    optimizer.step = step
    load("old")
    reference = None
    if cfg.kl_coef:
        reference = replace(policy, model=copy.deepcopy(policy.model), value_head=None)
        reference.model.load_state_dict(
            {k: v.float() for k, v in models["reference"].state_dict().items()}
        )
    metrics = single_update(cfg, policy, optimizer, rollouts, reference=reference)
    return gradients, metrics["loss"]


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[pytest.mark.slow] * (s >= FAST)) for s in range(CONFIGS)]
)
def test_both_gradients_of_an_update_equal_float64_loops(seed, folder, weights):
    cfg = draw_settings(seed)
    rollouts = draw_rollouts(seed, weights, cfg.temperature)
    head = None
    if cfg.algo == "ppo":
        generator = torch.Generator().manual_seed(seed)
        head = tuple(
            (0.3 * torch.randn(shape, generator=generator)).double().requires_grad_()
            for shape in ((1, 32), (1,))
        )
    theirs, their_loss = reference_gradients(cfg, rollouts, weights, head)
    ours, loss = our_gradients(cfg, rollouts, folder, weights, head)
    assert len(ours) == 2 and loss == pytest.approx(their_loss, rel=1e-4, abs=1e-4)
    for mine, other in zip(ours, theirs, strict=True):
        assert other.norm() > 1e-4
        assert (mine - other).norm() < TOLERANCE * other.norm()
