"""Mistakes as participants write them into scratch.py, and unusual solutions that are right.

Each changes the solution of one exercise; the checker sees only the resulting functions. The right
ones are those furthest from the solution: other precision, other algebra, other types, in place.
"""

import ast
import inspect
from types import ModuleType

import pytest

from core.workshop import solutions
from core.workshop.checker import check
from core.workshop.exercises import EXERCISES

PICK = "all_logprobs.gather(-1, ids[:, None]).squeeze(-1)"
DRAWN = "    ids = torch.multinomial(all_logprobs.exp(), 1, generator=generator).squeeze(-1)\n"
DRAWN += f"    return ids, {PICK}\n"
MEMBERS = "advantages[members] = centered / (returns[members].std() + 1e-4)"
MINIMUM = "torch.minimum(ratio * advantages, clipped * advantages)"
CLIP = "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
ROWS = "    return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()\n"

# (what, words of the true cause or of what is observed, old text, new text, ..), or
# (what, words, a whole body). These are other texts than those of core/workshop/mistakes.py.
MISTAKES: dict[str, list[tuple[str, ...]]] = {
    "token_logprobs": [
        ("nll_loss", "wrong sign", "    import torch.nn.functional as F\n"
         "    return F.nll_loss(logits[:, :-1].log_softmax(-1).transpose(1,2), input_ids[:, 1:], "
         "reduction='none')\n"),
        ("cross_entropy with its mean", "a mean over tokens",
         "    import torch.nn.functional as F\n"
         "    return F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())\n"),
        ("log of a clamped softmax", "log of softmax", ".log_softmax(-1)",
         ".softmax(-1).clamp(min=1e-8).log()"),
        ("no_grad", "no gradient", "    with torch.no_grad():\n        all_logprobs = "
         "logits.log_softmax(-1)[:, :-1]\n"
         "    return all_logprobs.gather(-1, input_ids[:, 1:, None])[..., 0]\n"),
        ("returns numpy", "NumPy", ".squeeze(-1)", ".squeeze(-1).detach().numpy()"),
        ("returns nothing", "None", "return all_logprobs", "all_logprobs"),
        ("ids as an index", "observed: the shape",
         "    return logits[:, :-1].log_softmax(-1)[:, :, input_ids[:, 1:]]\n"),
        ("log10", "observed: every number is 0.4343 times", ".log_softmax(-1)",
         ".softmax(-1).log10()"),
    ],
    "completion_mask": [
        ("roll", "shifted by roll", "torch.tensor(sampled[1:], dtype=torch.bool)",
         "torch.tensor(sampled).roll(-1)"),
        ("shift within each turn", "within each turn",
         "sampled += [False] * len(context) + [True] * len(completion)",
         "sampled += ([False] * len(context) + [True] * len(completion))[1:]", "sampled[1:]",
         "sampled"),
        ("filled up in front", "in front", "sampled[1:]", "[False] + sampled[1:]"),
        ("0 and 1 instead of bool", "integer tensor", "dtype=torch.bool", "dtype=torch.int64"),
    ],
    "group_advantages": [
        ("whole batch", "whole batch",
         "    return (returns - returns.mean()) / (returns.std() + 1e-4)\n"),
        ("view(-1, 2)", "neighbors", "    r = returns.view(-1, 2)\n" + ROWS),
        ("reshape(number of groups, -1)", "neighbors",
         "    r = returns.reshape(len(group_ids.unique()), -1)\n" + ROWS),
        ("values in group order", "in the order of the groups",
         "advantages = torch.zeros_like(returns)", "advantages = []", MEMBERS,
         "advantages.append(centered / (returns[members].std() + 1e-4))", "return advantages",
         "return torch.cat(advantages)"),
        ("group ids as an index", "observed: the function raises",
         "    means = torch.stack([returns[group_ids == g].mean() for g in group_ids.unique()])\n"
         "    return returns - means[group_ids]\n"),
    ],
    "reinforce_loss": [
        ("where after the product", "mask was applied last", "(advantages[mask] * logprobs[mask])",
         "torch.where(mask, advantages * logprobs, 0)"),
        ("a float", "a float;", "return -", "return float(-", "mask.sum()", "mask.sum())"),
        ("half the loss", "observed: the number is 0.5 times", "return -", "return -0.5 * "),
    ],
    "clipped_loss": [
        ("minimum of the negated products", "larger", MINIMUM,
         "-torch.minimum(-ratio * advantages, -clipped * advantages)"),
        ("where |ratio - 1| is large", "only the clipped product", MINIMUM,
         "torch.where((ratio - 1).abs() > clip, clipped * advantages, ratio * advantages)"),
        ("if", "`if`", "    clipped = ", "    if ratio > 1 + clip: ratio = ratio\n    clipped = "),
    ],
    "kl_k3": [
        ("mean", "a mean", "log_r.exp() - 1 - log_r", "(log_r.exp() - 1 - log_r).mean()"),
    ],
    "gae": [
        ("next value never kept", "next value is missing",
         "next_value, next_advantage = values[t], advantages[t]", "next_advantage = advantages[t]"),
        ("left to right", "left to right",
         "    deltas = rewards + gamma * torch.cat([values[1:], torch.zeros(1)]) - values\n"
         "    out, a = [], 0.0\n"
         "    for delta in deltas:\n        a = delta + gamma * lam * a\n        out.append(a)\n"
         "    return torch.stack(out)\n"),
        ("sign of δ", "wrong sign", "delta = rewards[t] + gamma * next_value - values[t]",
         "delta = values[t] - rewards[t] - gamma * next_value"),
    ],
    "sample": [
        ("small temperature for 0", "small number",
         "    all_logprobs = (logits / max(temperature, 1e-8)).log_softmax(-1)\n" + DRAWN),
        ("no case for temperature 0", "division by temperature 0",
         "    all_logprobs = (logits / temperature).log_softmax(-1)\n" + DRAWN),
        ("exchanged results", "result 1", "return ids, " + PICK, "return " + PICK + ", ids"),
        ("only ids", "a tuple is asked for", "return ids, " + PICK, "return ids"),
    ],
    "training_step": [
        ("clipped before backward", "not clipped", "    loss.backward()\n" + CLIP,
         CLIP + "    loss.backward()\n"),
        ("old log-probs of a second pass", "carry a gradient", "logprobs.detach(), ",
         "token_logprobs(model(input_ids), input_ids), "),
        ("backward without brackets", "backward was not called", "backward()", "backward"),
        ("(-loss).backward()", "wrong direction", "loss.backward()", "(-loss).backward()"),
        ("loss as a tensor", "a float tensor", "return loss.item()", "return loss"),
    ],
    "advantages_of_tokens": [
        ("mean of each rollout", "still the reward per token", "(rewards * mask).sum(1)",
         "torch.stack([r[m].mean() for r, m in zip(rewards, mask)])"),
        ("one number for each rollout", "observed: the shape", ")[:, None] * mask", ")"),
    ],
}  # fmt: skip

RIGHT: dict[str, list[tuple[str, ...]]] = {  # other solutions that are right too
    "token_logprobs": [
        ("einsum onehot", "    import torch.nn.functional as F\n"
         "    hot = F.one_hot(input_ids[:, 1:], logits.shape[-1]).to(logits.dtype)\n"
         "    return torch.einsum('btv,btv->bt', logits[:, :-1].log_softmax(-1), hot)\n"),
        ("cross entropy", "    import torch.nn.functional as F\n"
         "    return -F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), input_ids[:, "
         "1:].reshape(-1), reduction='none').view(input_ids.shape[0], -1)\n"),
        ("float64", "logits[:, :-1]", "logits[:, :-1].double()"),
        ("softmax then shift, slice", "    lp = logits.log_softmax(2)\n"
         "    return torch.take_along_dim(lp, input_ids.roll(-1, 1)[..., None], 2)[:, :-1, 0]\n"),
    ],
    "completion_mask": [
        ("cat",
         "    return torch.cat([torch.cat([torch.zeros(len(c)), torch.ones(len(d))]) for c, d in "
         "turns])[1:].bool()\n"),
        ("ones ==", "    out = []\n"
         "    for c, d in turns:\n"
         "        out.extend(0 for _ in c)\n"
         "        out.extend(1 for _ in d)\n"
         "    return torch.tensor(out)[1:] == 1\n"),
        ("first turn shorter", "    out = []\n"
         "    for i, (c, d) in enumerate(turns):\n"
         "        out += [False] * (len(c) - (i == 0)) + [True] * len(d)\n"
         "    return torch.tensor(out)\n"),
        ("pop/mutates", "    out = []\n"
         "    for c, d in turns:\n"
         "        while c: c.pop(); out.append(False)\n"
         "        while d: d.pop(); out.append(True)\n"
         "    return torch.BoolTensor(out[1:])\n"),
    ],
    "group_advantages": [
        ("float64 out", "torch.zeros_like(returns)",
         "torch.zeros_like(returns, dtype=torch.float64)",
         "advantages[members] = centered / (returns[members].std() + 1e-4)",
         "advantages[members] = (centered / (returns[members].std() + 1e-4)).double()"),
        ("eps 1e-9", "1e-4", "1e-9"),
        ("eps 2e-4", "1e-4", "2e-4"),
        ("clamp", "advantages[members] = centered / (returns[members].std() + 1e-4)",
         "advantages[members] = centered / returns[members].std().clamp(min=1e-4)"),
        ("nan_to_num", "advantages[members] = centered / (returns[members].std() + 1e-4)",
         "advantages[members] = (centered / returns[members].std()).nan_to_num()"),
        ("python statistics", "    import statistics\n"
         "    out = []\n"
         "    for r, g in zip(returns.tolist(), group_ids.tolist()):\n"
         "        mine = [x for x, h in zip(returns.tolist(), group_ids.tolist()) if h == g]\n"
         "        out.append((r - statistics.mean(mine)) / (statistics.stdev(mine) + 1e-4))\n"
         "    return torch.tensor(out)\n"),
        ("in place", "    for g in set(group_ids.tolist()):\n"
         "        m = group_ids == g\n"
         "        s = returns[m].std() + 1e-4\n"
         "        returns[m] -= returns[m].mean()\n"
         "        returns[m] /= s\n"
         "    return returns\n"),
        ("eps sqrt var + 1e-10 + nothing",
         "advantages[members] = centered / (returns[members].std() + 1e-4)",
         "advantages[members] = centered * torch.rsqrt(returns[members].var() + 1e-10)"),
    ],
    "reinforce_loss": [
        ("loop", "    total, n = 0.0, 0\n"
         "    for b in range(len(mask)):\n"
         "        for t in range(mask.shape[1]):\n"
         "            if mask[b, t]:\n"
         "                total = total - advantages[b, t] * logprobs[b, t]\n"
         "                n += 1\n"
         "    return total / n\n"),
        ("where both",
         "    x = torch.where(mask, logprobs, 0.0); a = torch.where(mask, advantages, 0.0)\n"
         "    return -(a * x).sum() / mask.sum()\n"),
        ("double", "    return -(advantages[mask].double() * logprobs[mask].double()).mean()\n"),
    ],
    "clipped_loss": [
        ("exp/exp", "(logprobs - old_logprobs).exp()", "logprobs.exp() / old_logprobs.exp()"),
        ("clamp in log space", "ratio.clamp(1 - clip, 1 + clip)",
         "(logprobs - old_logprobs).clamp(torch.tensor(1 - clip).log(), torch.tensor(1 + "
         "clip).log()).exp()"),
        ("double", "    logprobs, old_logprobs, advantages = logprobs[mask], old_logprobs[mask], "
         "advantages[mask]\n", "    logprobs, old_logprobs, advantages = logprobs[mask].double(), "
         "old_logprobs[mask].double(), advantages[mask].double()\n"),
        ("python min", "    ts = []\n"
         "    for x, o, a in zip(logprobs[mask], old_logprobs[mask], advantages[mask]):\n"
         "        r = (x - o).exp()\n"
         "        ts.append(min(r * a, torch.clip(r, 1 - clip, 1 + clip) * a))\n"
         "    return -sum(ts) / len(ts)\n"),
        ("relu form", "    x, o, a = logprobs[mask], old_logprobs[mask], advantages[mask]\n"
         "    r = (x - o).exp()\n"
         "    return -(r * a - (a * (r - 1) - clip * a.abs()).relu()).mean()\n"),
    ],
    "kl_k3": [
        ("expm1", "return log_r.exp() - 1 - log_r", "return torch.expm1(log_r) - log_r"),
        ("exp/exp", "return log_r.exp() - 1 - log_r",
         "r = ref_logprobs.exp() / logprobs.exp(); return r - 1 - r.log()"),
        ("relu", "return log_r.exp() - 1 - log_r", "return (log_r.exp() - 1 - log_r).relu()"),
        ("loop",
         "    return torch.stack([torch.stack([(b - a).exp() - 1 - (b - a) for a, b in zip(x, "
         "y)]) for x, y in zip(logprobs, ref_logprobs)])\n"),
    ],
    "gae": [
        ("python floats", "    out, nv, na = [], 0.0, 0.0\n"
         "    for r, v in zip(rewards.tolist()[::-1], values.tolist()[::-1]):\n"
         "        na = r + gamma * nv - v + gamma * lam * na\n"
         "        nv = v\n"
         "        out.append(na)\n"
         "    return torch.tensor(out[::-1])\n"),
        ("matrix", "    n = len(rewards)\n"
         "    d = rewards + gamma * torch.cat([values[1:], torch.zeros(1)]) - values\n"
         "    i = torch.arange(n)\n"
         "    p = (i[None] - i[:, None]).clamp(min=0)\n"
         "    return torch.triu((gamma * lam) ** p.float()) @ d\n"),
        ("double", "    r, v = rewards.double(), values.double()\n"
         "    out = torch.zeros_like(r)\n"
         "    na = nv = 0.0\n"
         "    for t in range(len(r) - 1, -1, -1):\n"
         "        na = r[t] + gamma * nv - v[t] + gamma * lam * na\n"
         "        nv = v[t]\n"
         "        out[t] = na\n"
         "    return out\n"),
        ("in place on rewards", "    for t in reversed(range(len(rewards))):\n"
         "        last = t == len(rewards) - 1\n"
         "        rewards[t] = rewards[t] - values[t] + (0 if last else gamma * values[t+1] + "
         "gamma * lam * rewards[t+1])\n"
         "    return rewards\n"),
        ("lambda return form", "    n = len(rewards)\n"
         "    ret = torch.zeros(n + 1); v = torch.cat([values, torch.zeros(1)])\n"
         "    for t in reversed(range(n)):\n"
         "        ret[t] = rewards[t] + gamma * ((1 - lam) * v[t + 1] + lam * ret[t + 1])\n"
         "    return ret[:-1] - values\n"),
    ],
    "sample": [
        ("gumbel", "    if temperature == 0:\n"
         "        ids = logits.argmax(-1); lp = logits.log_softmax(-1)\n"
         "    else:\n"
         "        lp = (logits / temperature).log_softmax(-1)\n"
         "        g = -torch.empty_like(lp).exponential_(generator=generator).log()\n"
         "        ids = (lp + g).argmax(-1)\n"
         "    return ids, lp.gather(-1, ids[:, None])[:, 0]\n"),
        ("inverse cdf", "    if temperature == 0:\n"
         "        ids = logits.argmax(-1); lp = logits.log_softmax(-1)\n"
         "    else:\n"
         "        lp = (logits / temperature).log_softmax(-1)\n"
         "        u = torch.rand(len(logits), 1, generator=generator)\n"
         "        ids = (lp.exp().cumsum(-1) < u).sum(-1).clamp(max=logits.shape[-1] - 1)\n"
         "    return ids, lp.gather(-1, ids[:, None])[:, 0]\n"),
        ("unnormalised probs ok", "torch.multinomial(all_logprobs.exp(), 1",
         "torch.multinomial((logits / temperature).exp(), 1"),
        ("list returned", "    return ids, all_logprobs.gather(-1, ids[:, None]).squeeze(-1)",
         "    return [ids, all_logprobs.gather(-1, ids[:, None]).squeeze(-1)]"),
        ("max at T0", "    if temperature == 0:\n"
         "        lp, ids = logits.log_softmax(-1).max(-1)\n"
         "        return ids, lp\n"
         "    p = torch.softmax(logits / temperature, -1)\n"
         "    ids = torch.multinomial(p, 1, generator=generator)\n"
         "    return ids.squeeze(-1), p.gather(-1, ids).log().squeeze(-1)\n"),
        ("int32 ids", "return ids, ", "return ids.int(), "),
    ],
    "training_step": [
        ("times mask", "[:, None].expand_as(logprobs)", "[:, None] * mask"),
        ("autograd.grad", "loss.backward()", "\n"
         "    for p, g in zip(model.parameters(), torch.autograd.grad(loss, "
         "list(model.parameters()))): p.grad = g"),
        ("closure", "    loss.backward()\n"
         "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
         "    optimizer.step()", "    def closure():\n"
         "        loss.backward()\n"
         "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
         "        return loss\n"
         "    optimizer.step(closure)"),
        ("manual clip", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
         "n = sum((p.grad ** 2).sum() for p in model.parameters()).sqrt()\n"
         "    for p in model.parameters(): p.grad *= min(1.0, 1.0 / (float(n) + 1e-6))"),
        ("inline all", "    B = len(returns)\n"
         "    lp = model(input_ids)[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, "
         "None]).squeeze(-1)\n"
         "    adv = torch.zeros(B)\n"
         "    for g in group_ids.unique():\n"
         "        m = group_ids == g\n"
         "        adv[m] = (returns[m] - returns[m].mean()) / (returns[m].std() + 1e-4)\n"
         "    loss = -((lp - lp.detach()).exp() * adv[:, None])[mask].mean()\n"
         "    loss.backward()\n"
         "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
         "    optimizer.step()\n"
         "    optimizer.zero_grad()\n"
         "    return float(loss)\n"),
        ("kw", "clipped_loss(logprobs, logprobs.detach(), advantages, mask)",
         "clipped_loss(mask=mask, advantages=advantages, old_logprobs=logprobs.detach(), "
         "logprobs=logprobs)"),
    ],
    "advantages_of_tokens": [
        ("loop", "    out = torch.zeros_like(rewards)\n"
         "    ret = [float(r[m].sum()) for r, m in zip(rewards, mask)]\n"
         "    for b in range(len(ret)):\n"
         "        g = [x for x, h in zip(ret, group_ids.tolist()) if h == int(group_ids[b])]\n"
         "        out[b, mask[b]] = ret[b] - sum(g) / len(g)\n"
         "    return out\n"),
        ("double", "(rewards * mask).sum(1)",
         "(rewards.double() * mask).sum(1)", ".float()", ".double()"),
        ("where at end", "return (returns - baseline)[:, None] * mask",
         "return torch.where(mask, (returns - baseline)[:, None], 0.0)"),
        ("nansum", "(rewards * mask).sum(1)", "rewards.masked_fill(~mask, float('nan')).nansum(1)"),
    ],
}  # fmt: skip

ALL = {exercise.name: exercise for exercise in EXERCISES}


def scratch_with(name: str, changes: tuple[str, ...]) -> ModuleType:
    """The solutions, one of them with the changes or with another body."""
    code = inspect.getsource(getattr(solutions, name))
    if len(changes) == 1:
        first = ast.parse(code).body[0].body[0].lineno
        code = "".join(code.splitlines(keepends=True)[: first - 1]) + changes[0]
    for old, new in zip(changes[:-1:2], changes[1::2], strict=True):
        assert old in code, (name, old)
        code = code.replace(old, new)
    module = ModuleType("scratch")
    module.__file__ = "scratch.py"
    exec(compile(inspect.getsource(solutions), "scratch.py", "exec"), vars(module))
    exec(compile(code, "scratch.py", "exec"), vars(module))
    return module


def flat(table: dict[str, list[tuple[str, ...]]]) -> list:
    return [
        pytest.param(name, *case[:n], case[n:], id=f"{name}: {case[0]}")
        for n in [2 if table is MISTAKES else 1]
        for name, cases in table.items()
        for case in cases
    ]


@pytest.mark.parametrize("name, what, words, changes", flat(MISTAKES))
def test_mistake_is_caught_with_its_true_cause(name, what, words, changes):
    verdict = check(ALL[name], scratch_with(name, changes))
    assert verdict.state == "wrong" and verdict.hints[2] in inspect.getsource(solutions)
    said = verdict.cause or f"observed: {verdict.observed}"
    assert words in said and "; or: " not in said


@pytest.mark.parametrize("name, what, changes", flat(RIGHT))
def test_unusual_solution_is_right(name, what, changes):
    assert check(ALL[name], scratch_with(name, changes)).state == "right"
