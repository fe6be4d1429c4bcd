"""Tries mistakes of each exercise of scratch.py, as a new user would make them.

    python runs/workshop_checker/try_mistakes.py     # half a minute; writes README.md here

Each mistake changes the solution of one exercise: (what, words that the named cause must contain,
old text, new text, ..), or (what, words, a whole body). The checker sees only the resulting file.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from core.workshop import solutions
from core.workshop.checker import Verdict, check
from core.workshop.exercises import EXERCISES, Exercise

FOLDER = Path(__file__).parent
MEMBERS = "advantages[members] = centered / (returns[members].std() + 1e-4)"
CENTERED = "centered = returns[members] - returns[members].mean()"
PICK = "all_logprobs.gather(-1, ids[:, None]).squeeze(-1)"
DRAW = "torch.multinomial(all_logprobs.exp(), 1, generator=generator).squeeze(-1)"
VALUES = "next_value, next_advantage = values[t], advantages[t]"
BASELINE = "baseline = (same @ returns) / same.sum(1)"
LAST = "return (returns - baseline)[:, None] * mask"
MINIMUM = "torch.minimum(ratio * advantages, clipped * advantages)"
SELECT = "    logprobs, old_logprobs, advantages = "
SELECT += "logprobs[mask], old_logprobs[mask], advantages[mask]\n"
ROWS = "    return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()\n"
DRAWN = f"    ids = {DRAW}\n    return ids, {PICK}\n"
K3 = "return log_r.exp() - 1 - log_r"
GAE_AS_LIST = """    result, next_value, later = [], 0.0, 0.0
    for t in reversed(range(len(rewards))):
        later = rewards[t] + gamma * next_value - values[t] + gamma * lam * later
        result.append(later)
        next_value = values[t]
    return {}
"""

MISTAKES: dict[str, list[tuple[str, ...]]] = {
    "token_logprobs": [
        ("ids not shifted", "not shifted", "input_ids[:, 1:, None]", "input_ids[:, :-1, None]"),
        ("shifted the wrong way", "wrong way", "logits[:, :-1]", "logits[:, 1:]",
         "input_ids[:, 1:, None]", "input_ids[:, :-1, None]"),
        ("first logits dropped", "dropped the first position", "logits[:, :-1]", "logits[:, 1:]"),
        ("nothing dropped", "neither logits nor ids", "logits[:, :-1]", "logits",
         "input_ids[:, 1:,", "input_ids[:, :,"),
        ("no log_softmax", "these are logits", ".log_softmax(-1)", ""),
        ("softmax only", "these are probabilities", ".log_softmax(-1)", ".softmax(-1)"),
        ("log of softmax", "log of softmax", ".log_softmax(-1)", ".softmax(-1).log()"),
        ("log of a sum of exp", "exp overflows", "logits[:, :-1].log_softmax(-1)",
         "logits[:, :-1] - logits[:, :-1].exp().sum(-1, keepdim=True).log()"),
        ("log2", "base 2", ".log_softmax(-1)", ".softmax(-1).log2()"),
        ("softmax over positions", "wrong axis", ".log_softmax(-1)", ".log_softmax(1)"),
        ("softmax over the batch", "wrong axis", ".log_softmax(-1)", ".log_softmax(0)"),
        ("cross-entropy", "wrong sign", "return all_logprobs", "return -all_logprobs"),
        ("forgotten squeeze", "squeeze was forgotten", ".squeeze(-1)", ""),
        ("ids without a third axis", "gather needs ids", "input_ids[:, 1:, None]).squeeze(-1)",
         "input_ids[:, 1:])"),
        ("largest log-prob", "likeliest token", ".gather(-1, input_ids[:, 1:, None]).squeeze(-1)",
         ".max(-1).values"),
        ("sum over tokens", "sum over the tokens", ".squeeze(-1)", ".squeeze(-1).sum(-1)"),
        ("detach", "detached", ".squeeze(-1)", ".squeeze(-1).detach()"),
        ("returns a list", "a list", ".squeeze(-1)", ".squeeze(-1).tolist()"),
        ("returns numpy", "NumPy", ".squeeze(-1)", ".squeeze(-1).detach().numpy()"),
        ("returns nothing", "None", "return all_logprobs", "all_logprobs"),
    ],
    "completion_mask": [
        ("not shifted", "not shifted", "sampled[1:]", "sampled"),
        ("last id dropped", "dropped the last id", "sampled[1:]", "sampled[:-1]"),
        ("shifted by roll", "roll", "torch.tensor(sampled[1:], dtype=torch.bool)",
         "torch.tensor(sampled).roll(-1)"),
        ("shift within each turn", "within each turn",
         "sampled += [False] * len(context) + [True] * len(completion)",
         "sampled += ([False] * len(context) + [True] * len(completion))[1:]", "sampled[1:]",
         "sampled"),
        ("one False fewer in each turn", "within each turn", "len(context)", "(len(context) - 1)",
         "sampled[1:]", "sampled"),
        ("inverted", "inverted", "[False]", "[0]", "[True]", "[False]", "[0]", "[True]"),
        ("only the last turn", "only the last turn", "        sampled += [False]",
         "        sampled = [False] * len(sampled) + [False]"),
        ("return inside the loop", "only the first turn", "    return", "        return"),
        ("<end> left out", "<end>", "[True] * len(completion)",
         "[True] * (len(completion) - 1) + [False]"),
        ("first sampled token left out", "first token of each completion",
         "[True] * len(completion)", "[False] + [True] * (len(completion) - 1)"),
        ("contexts first, completions later", "all contexts come first",
         "    for context, completion in turns:\n        "
         "sampled += [False] * len(context) + [True] * len(completion)",
         "    for context, _ in turns:\n"
         "        sampled += [False] * len(context)\n"
         "    for _, completion in turns:\n"
         "        sampled += [True] * len(completion)"),
        ("0 and 1 instead of bool", "integer tensor", "[False]", "[0]", "[True]", "[1]",
         "dtype=torch.bool", "dtype=torch.int64"),
        ("floats instead of bool", "a float tensor", "dtype=torch.bool", "dtype=torch.float32"),
        ("a list", "a list", "torch.tensor(sampled[1:], dtype=torch.bool)", "sampled[1:]"),
    ],
    "group_advantages": [
        ("whole batch instead of groups", "whole batch",
         "    return (returns - returns.mean()) / (returns.std() + 1e-4)\n"),
        ("median as baseline", "median", "returns[members].mean()", "returns[members].median()"),
        ("mean of the others as baseline", "leave-one-out", CENTERED,
         "r = returns[members]; centered = r - (r.sum() - r) / (len(r) - 1)"),
        ("values in group order", "in the order of the groups",
         "advantages = torch.zeros_like(returns)", "advantages = []", MEMBERS,
         "advantages.append(centered / (returns[members].std() + 1e-4))", "return advantages",
         "return torch.cat(advantages)"),
        ("view(-1, G) with G of the first group", "neighbors",
         "    G = int((group_ids == group_ids[0]).sum())\n    r = returns.view(-1, G)\n" + ROWS),
        ("view(-1, 2)", "neighbors",
         "    r = returns.view(-1, 2)\n" + ROWS),
        ("view(-1, 8)", "neighbors",
         "    r = returns.view(-1, 8)\n" + ROWS),
        ("reshape(number of groups, -1)", "neighbors",
         "    r = returns.reshape(len(group_ids.unique()), -1)\n" + ROWS),
        ("range(number of groups)", "another number", "group_ids.unique()",
         "range(len(group_ids.unique()))"),
        ("range(largest id)", "last group", "group_ids.unique()", "range(int(group_ids.max()))"),
        ("population standard deviation", "population", "members].std()",
         "members].std(correction=0)"),
        ("no division", "not divided", MEMBERS, "advantages[members] = centered"),
        ("variance", "variance", ".std()", ".var()"),
        ("multiplied by the standard deviation", "multiplied", MEMBERS,
         "advantages[members] = centered * (returns[members].std() + 1e-4)"),
        ("standard deviation of the batch", "standard deviation of the whole batch",
         "returns[members].std()", "returns.std()"),
        ("divided by the range", "range", "returns[members].std()",
         "returns[members].max() - returns[members].min()"),
        ("wrong sign", "wrong sign", CENTERED,
         "centered = returns[members].mean() - returns[members]"),
        ("no 1e-4", "0 divided by 0", " + 1e-4", ""),
        ("no baseline", "no baseline", " - returns[members].mean()", ""),
        ("extra axis", "extra axis", "return advantages", "return advantages[:, None]"),
        ("zeros like group_ids", "an integer tensor:", "zeros_like(returns)",
         "zeros_like(group_ids)"),
        ("a list", "a list", "return advantages", "return advantages.tolist()"),
    ],
    "reinforce_loss": [
        ("wrong sign", "wrong sign", "return -", "return "),
        ("a sum", "a sum", " / mask.sum()", ""),
        ("no mask", "mask is not used", "[mask]", "", "mask.sum()", "mask.numel()"),
        ("divided by all positions", "number of positions", "mask.sum()", "mask.numel()"),
        ("divided by the columns", "number of positions", "mask.sum()", "mask.shape[1]"),
        ("divided by the rollouts", "number of rollouts", "mask.sum()", "len(mask)"),
        ("mean, then divided", "twice", ").sum()", ").mean()"),
        ("mean of means", "each rollout's mean",
         "    terms = torch.where(mask, advantages * logprobs, 0)\n"
         "    return -(terms.sum(1) / mask.sum(1)).mean()\n"),
        ("multiplied by the mask", "multiplied by the mask",
         "(advantages[mask] * logprobs[mask])", "(advantages * logprobs * mask)"),
        ("product before the mask", "product was formed before",
         "(advantages[mask] * logprobs[mask])", "(advantages * logprobs)[mask]"),
        ("where after the product", "product was formed before",
         "(advantages[mask] * logprobs[mask])", "torch.where(mask, advantages * logprobs, 0)"),
        ("probability", "probability instead", "logprobs[mask]", "logprobs[mask].exp()"),
        ("no advantages", "advantages are missing", "advantages[mask] * ", ""),
        ("no log-probs", "log-probs are missing", " * logprobs[mask]", ""),
        ("detach", "detached", "logprobs[mask]", "logprobs[mask].detach()"),
        ("a float", "a float", "return -(advantages[mask] * logprobs[mask]).sum() / mask.sum()",
         "return float(-(advantages[mask] * logprobs[mask]).sum() / mask.sum())"),
    ],
    "clipped_loss": [
        ("wrong sign", "wrong sign", "return -", "return "),
        ("maximum", "larger", "torch.minimum", "torch.maximum"),
        ("only the clipped product", "only the clipped", MINIMUM, "clipped * advantages"),
        ("no clip", "not clipped", MINIMUM, "ratio * advantages"),
        ("clipped only from above", "only from above", "clamp(1 - clip, 1 + clip)",
         "clamp(max=1 + clip)"),
        ("clipped only from below", "only from below", "clamp(1 - clip, 1 + clip)",
         "clamp(min=1 - clip)"),
        ("clamped to -clip..clip", "bounds are", "clamp(1 - clip, 1 + clip)", "clamp(-clip, clip)"),
        ("log ratio clamped", "clamped log", "ratio.clamp(1 - clip, 1 + clip)",
         "(logprobs - old_logprobs).clamp(-clip, clip).exp()"),
        ("ratio inverted", "inverted", "logprobs - old_logprobs", "old_logprobs - logprobs"),
        ("log-probs divided", "divided log-probs", "(logprobs - old_logprobs).exp()",
         "logprobs / old_logprobs"),
        ("no exp", "logarithm of the ratio", ".exp()", ""),
        ("exp2", "power of 2", ".exp()", ".exp2()"),
        ("smaller ratio first", "before multiplying", MINIMUM,
         "torch.minimum(ratio, clipped) * advantages"),
        ("the loss of exercise 4", "exercise 4",
         "    return -(advantages[mask] * logprobs[mask]).sum() / mask.sum()\n"),
        ("no advantages", "advantages are missing", MINIMUM, "torch.minimum(ratio, clipped)"),
        ("no mask", "mask is not used", SELECT, "", "mask.sum()", "mask.numel()"),
        ("a sum", "a sum", " / mask.sum()", ""),
        ("divided by all positions", "number of positions", "mask.sum()", "mask.numel()"),
        ("divided by the rollouts", "number of rollouts", "mask.sum()", "len(mask)"),
        ("mean of means", "each rollout's mean", SELECT, "",
         "return -objective.sum() / mask.sum()",
         "return -(torch.where(mask, objective, 0).sum(1) / mask.sum(1)).mean()"),
        ("clip always 0.2", "always 0.2", "clamp(1 - clip, 1 + clip)", "clamp(0.8, 1.2)"),
        ("multiplied by the mask", "multiplied by the mask", SELECT, "", "objective.sum()",
         "(objective * mask).sum()"),
        ("mask at the end", "mask was applied last", SELECT, "", "objective.sum()",
         "objective[mask].sum()"),
        ("where at the end", "mask was applied last", SELECT, "", "objective.sum()",
         "torch.where(mask, objective, 0).sum()"),
        ("ratio detached", "detached", ".exp()", ".exp().detach()"),
        ("a float", "a float", "return -objective.sum() / mask.sum()",
         "return (-objective.sum() / mask.sum()).item()"),
    ],
    "kl_k3": [
        ("k1", "k1", K3, "return -log_r"),
        ("k2", "k2", K3, "return log_r**2 / 2"),
        ("absolute difference", "absolute", K3, "return log_r.abs()"),
        ("r inverted", "inverted", "ref_logprobs - logprobs", "logprobs - ref_logprobs"),
        ("sign of log r", "sign of log r", K3, "return log_r.exp() - 1 + log_r"),
        ("wrong sign", "wrong sign", K3, "return -(log_r.exp() - 1 - log_r)"),
        ("no log r", "log r is missing", K3, "return log_r.exp() - 1"),
        ("no 1", "1 is missing", K3, "return log_r.exp() - log_r"),
        ("log2", "base 2", K3, "r = log_r.exp()\n    return r - 1 - r.log2()"),
        ("exp2", "power of 2", ".exp()", ".exp2()"),
        ("log-probs divided", "divided log-probs",
         "    r = ref_logprobs / logprobs\n    return r - 1 - r.log()\n"),
        ("no exp", "exp is missing",
         "    r = ref_logprobs - logprobs\n    return r - 1 - r.log()\n"),
        ("mean", "average or a sum", K3, "return (log_r.exp() - 1 - log_r).mean()"),
        ("sum over tokens", "average or a sum", K3, "return (log_r.exp() - 1 - log_r).sum(-1)"),
        ("times the probability", "multiplied by the probability", K3,
         "return logprobs.exp() * (log_r.exp() - 1 - log_r)"),
        ("detach", "detached", "- logprobs", "- logprobs.detach()"),
    ],
    "gae": [
        ("no next value", "next value is missing", "gamma * next_value - ", "-"),
        ("next value never kept", "next value is missing", VALUES,
         "next_advantage = advantages[t]"),
        ("next value overwritten too early", "overwritten before", "        delta =",
         "        next_value = values[t]\n        delta ="),
        ("value not subtracted", "not subtracted", " - values[t]", ""),
        ("signs of the values exchanged", "exchanged", "+ gamma * next_value - values[t]",
         "- gamma * next_value + values[t]"),
        ("returns", "these are returns", "return advantages", "return advantages + values"),
        ("reversed list", "never reversed", GAE_AS_LIST.format("torch.stack(result)")),
        ("a list", "a list", GAE_AS_LIST.format("result[::-1]")),
        ("no γ before the advantage", "γ is missing before the next advantage",
         "gamma * lam * next", "lam * next"),
        ("no γ before the value", "γ is missing before the next value", "gamma * next_value",
         "next_value"),
        ("no γ at all", "γ is not used", "gamma * lam * next", "lam * next", "gamma * next_value",
         "next_value"),
        ("λ instead of γ", "λ stands in place", "gamma * next_value", "lam * next_value"),
        ("no λ", "λ is missing", "gamma * lam * next", "gamma * next"),
        ("last value again", "last value is used again",
         "next_value = next_advantage = torch.tensor(0.0)",
         "next_value, next_advantage = values[-1], 0.0"),
        ("left to right", "left to right",
         "    deltas = rewards + gamma * torch.cat([values[1:], torch.zeros(1)]) - values\n"
         "    out, a = [], 0.0\n"
         "    for delta in deltas:\n        a = delta + gamma * lam * a\n        out.append(a)\n"
         "    return torch.stack(out)\n"),
        ("only δ", "only δ_t", " + gamma * lam * next_advantage", ""),
        ("next advantage never kept", "only δ_t", VALUES, "next_value = values[t]"),
        ("last token left out", "last token was left out",
         "next_value = next_advantage = torch.tensor(0.0)",
         "next_value, next_advantage = values[-1], 0.0", "range(len(rewards))",
         "range(len(rewards) - 1)"),
        ("values[t + 1]", "does not exist", "gamma * next_value", "gamma * values[t + 1]"),
        ("forward loop", "left to right", "reversed(range(len(rewards)))", "range(len(rewards))"),
    ],
    "sample": [
        ("argmax", "most likely token", DRAW, "all_logprobs.argmax(-1)"),
        ("uniform draws", "equally likely", DRAW,
         "torch.multinomial(torch.ones_like(logits), 1, generator=generator).squeeze(-1)"),
        ("multinomial of logits", "multinomial got logits", "all_logprobs.exp()", "logits"),
        ("multinomial of log-probs", "multinomial got logits", "all_logprobs.exp()",
         "all_logprobs"),
        ("no temperature", "temperature is not used", "(logits / temperature)", "logits"),
        ("times temperature", "multiplied by the temperature", "(logits / temperature)",
         "(logits * temperature)"),
        ("log-prob without temperature", "another distribution", "return ids, all_logprobs",
         "return ids, logits.log_softmax(-1)"),
        ("probabilities", "these are probabilities", "squeeze(-1)\n    return ids, all_logprobs",
         "squeeze(-1)\n    return ids, all_logprobs.exp()"),
        ("log2", "base 2", "return ids, " + PICK,
         "return ids, " + PICK + " / torch.tensor(2.0).log()"),
        ("logits instead of log-probs", "these are logits", "return ids, all_logprobs",
         "return ids, (logits / (temperature or 1))"),
        ("log-prob of the likeliest", "that of the most likely", "return ids, " + PICK,
         "return ids, all_logprobs.max(-1).values"),
        ("drawn twice", "different draws", "return ids, " + PICK,
         "again = ids if temperature == 0 else " + DRAW + "\n    "
         "return ids, all_logprobs.gather(-1, again[:, None]).squeeze(-1)"),
        ("log-probs sorted", "different rows", "return ids, " + PICK,
         "return ids, " + PICK + ".sort().values"),
        ("no case for temperature 0", "division by temperature 0",
         "    all_logprobs = (logits / temperature).log_softmax(-1)\n" + DRAWN),
        ("small temperature for 0", "small number",
         "    all_logprobs = (logits / max(temperature, 1e-6)).log_softmax(-1)\n" + DRAWN),
        ("temperature 0 as 1", "temperature 0 samples",
         "    all_logprobs = (logits / (temperature or 1)).log_softmax(-1)\n" + DRAWN),
        ("forgotten squeeze", "squeeze was forgotten", "return ids, " + PICK,
         "return ids, all_logprobs.gather(-1, ids[:, None])"),
        ("all log-probs", "all V log-probs", "return ids, " + PICK, "return ids, all_logprobs"),
        ("no generator", "generator is not used", ", generator=generator", ""),
        ("only ids", "a tuple is asked for", "return ids, " + PICK, "return ids"),
        ("ids as floats", "a float tensor", "return ids, ", "return ids.float(), "),
        ("lists", "a list", "return ids, " + PICK, "return ids.tolist(), " + PICK + ".tolist()"),
        ("exchanged results", "result 1", "return ids, " + PICK, "return " + PICK + ", ids"),
    ],
    "training_step": [
        ("old log-probs not detached", "carry a gradient", "logprobs.detach()", "logprobs"),
        ("no optimizer step", "optimizer.step() was not called", "    optimizer.step()\n", ""),
        ("zero_grad before the step", "before the step",
         "    optimizer.step()\n    optimizer.zero_grad()",
         "    optimizer.zero_grad()\n    optimizer.step()"),
        ("no backward", "backward was not called", "    loss.backward()\n", ""),
        ("step before backward", "before backward", "    optimizer.step()\n", "",
         "    loss.backward()", "    optimizer.step()\n    loss.backward()"),
        ("norm not clipped", "not clipped",
         "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),
        ("clipped before backward", "not clipped",
         "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", "", "    loss.backward()",
         "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    loss.backward()"),
        ("values clipped", "each entry", "clip_grad_norm_", "clip_grad_value_"),
        ("no zero_grad", "adds up", "    optimizer.zero_grad()\n", ""),
        ("zero_grad only at the start", "only before backward", "    optimizer.zero_grad()\n", "",
         "    logprobs =", "    optimizer.zero_grad()\n    logprobs ="),
        ("loss negated", "negated once more", "loss = clipped_loss", "loss = -clipped_loss"),
        ("returns as advantages", "returns were used", "group_advantages(returns, group_ids)",
         "returns"),
        ("one group for all", "whole batch", "group_advantages(returns, group_ids)",
         "group_advantages(returns, torch.zeros_like(group_ids))"),
        ("reinforce_loss", "reinforce_loss",
         "clipped_loss(logprobs, logprobs.detach(), advantages, mask)",
         "reinforce_loss(logprobs, advantages, mask)"),
        ("no mask", "mask is not used", "advantages, mask)", "advantages, torch.ones_like(mask))"),
        ("loss as a tensor", "a float tensor", "return loss.item()", "return loss"),
        ("loss detached, as a tensor", "a float tensor", "return loss.item()",
         "return loss.detach()"),
        ("nothing returned", "None", "    return loss.item()\n", ""),
    ],
    "advantages_of_tokens": [
        ("division moved to the last line", "moved to the last line", LAST,
         LAST + " / mask.sum(1)[:, None]"),
        ("division by len(same)", "len(same)", BASELINE, "baseline = (same @ returns) / len(same)"),
        ("baseline of all rollouts", "groups mix", BASELINE, "baseline = returns.mean()"),
        ("mean over columns", "number of columns", "(rewards * mask).sum(1)",
         "(rewards * mask).mean(1)"),
        ("divided by all tokens", "all sampled tokens", "(rewards * mask).sum(1)",
         "(rewards * mask).sum(1) / mask.sum()"),
        ("last column", "last column", "(rewards * mask).sum(1)", "(rewards * mask)[:, -1]"),
        ("largest reward", "largest reward", "(rewards * mask).sum(1)", "(rewards * mask).amax(1)"),
        ("divided by the standard deviation", "standard deviation", LAST,
         "return group_advantages(returns, group_ids)[:, None] * mask"),
        ("no baseline", "no baseline", " - baseline", ""),
        ("rewards to go", "from it on", "    same =",
         "    later = (rewards * mask).flip(1).cumsum(1).flip(1)\n    same =", LAST,
         "return (later - baseline[:, None]) * mask"),
        ("padding counted", "rewards in the padding", "(rewards * mask).sum(1)", "rewards.sum(1)"),
        ("padding has advantages", "padding got", LAST,
         "return (returns - baseline)[:, None].expand_as(rewards)"),
        ("one number for each rollout", "observed: the shape", LAST, "return returns - baseline"),
    ],
}  # fmt: skip


# mistakes that core/workshop/mistakes.py does not know: (what, old text, new text, ..)
UNKNOWN: dict[str, list[tuple[str, ...]]] = {
    "token_logprobs": [
        ("logits divided by 2", "logits[:, :-1]", "(logits[:, :-1] / 2)"),
        ("softmax of a softmax", ".log_softmax(-1)", ".softmax(-1).log_softmax(-1)"),
        ("next token but one", "input_ids[:, 1:, None]", "input_ids.roll(-2, 1)[:, :-1, None]"),
    ],
    "completion_mask": [
        ("only the last token of a completion", "[True] * len(completion)",
         "[False] * (len(completion) - 1) + [True]"),
        ("two entries dropped", "sampled[1:]", "sampled[2:]"),
    ],
    "group_advantages": [
        ("largest return as baseline", "returns[members].mean()", "returns[members].max()"),
        ("1e-4 is 0.1", "1e-4", "0.1"),
        ("square root of the standard deviation", ".std()", ".std().sqrt()"),
        ("clamped to -1/2..1/2", "return advantages", "return advantages.clamp(-0.5, 0.5)"),
    ],
    "reinforce_loss": [
        ("squared advantages", "(advantages[mask]", "(advantages[mask] ** 2"),
        ("half the loss", "return -", "return -0.5 * "),
        ("mask inverted", "[mask]", "[~mask]"),
    ],
    "clipped_loss": [
        ("upper bound 1.28", "1 + clip", "1.28"),
        ("ratio squared", ".exp()", ".exp() ** 2"),
        ("clipped advantage too", "clipped * advantages", "clipped * advantages.clamp(-1, 1)"),
    ],
    "kl_k3": [
        ("half of k3", K3, "return (log_r.exp() - 1 - log_r) / 2"),
        ("r squared", "log_r.exp()", "log_r.exp() ** 2"),
    ],
    "gae": [
        ("γ squared", "gamma * lam", "gamma * gamma * lam"),
        ("normalized", "return advantages", "return (advantages - advantages.mean())"),
        ("reward of the next token", "rewards[t]", "rewards[min(t + 1, len(rewards) - 1)]"),
    ],
    "sample": [
        ("temperature squared", "logits / temperature", "logits / temperature**2"),
        ("least likely token at 0", "logits.argmax(-1)", "logits.argmin(-1)"),
        ("log-probs shifted by 1", "return ids, " + PICK, "return ids, " + PICK + " + 1"),
    ],
    "training_step": [
        ("two steps", "optimizer.step()", "optimizer.step()\n    optimizer.step()"),
        ("norm of 0.5", "1.0)", "0.5)"),
        ("mask inverted", "advantages, mask)", "advantages, ~mask)"),
    ],
    "advantages_of_tokens": [
        ("divided by the root of the length", "(rewards * mask).sum(1)",
         "(rewards * mask).sum(1) / mask.sum(1).sqrt()"),
        ("half the baseline", "- baseline", "- baseline / 2"),
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """A mistake, and what the checker says about it."""

    exercise: Exercise
    what: str
    words: str  # the named cause must contain them; "": the checker does not know the mistake
    verdict: Verdict

    @property
    def said(self) -> str:
        """The cause, or what the checker observed."""
        return self.verdict.cause or f"observed: {self.verdict.observed}"

    @property
    def caught(self) -> bool:
        return self.verdict.state == "wrong"

    @property
    def named(self) -> bool:
        """Whether the true cause was named, and no other; or, for an unknown mistake, none."""
        known = self.words in self.said and "; or: " not in self.said
        return self.caught and (known if self.words else not self.verdict.cause)


def code_with(name: str, changes: tuple[str, ...]) -> str:
    """Returns the solution of an exercise with the changes, or with another body."""
    source = inspect.getsource(getattr(solutions, name))
    if len(changes) == 1:
        end = source.index(":\n", source.index(") ->")) + 2
        return source[:end] + changes[0]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in source, (name, old)
        source = source.replace(old, new)
    return source


def try_all() -> Iterator[Trial]:
    """Checks each mistake, alone in a file of solutions; those of UNKNOWN come last."""
    known = [(e, mistake) for e in EXERCISES for mistake in MISTAKES[e.name]]
    unknown = [(e, (m[0], "", *m[1:])) for e in EXERCISES for m in UNKNOWN[e.name]]
    everything = compile(inspect.getsource(solutions), "scratch.py", "exec")
    for exercise, (what, words, *changes) in known + unknown:
        names: dict[str, Any] = {}
        exec(everything, names)
        exec(code_with(exercise.name, tuple(changes)), names)
        yield Trial(exercise, what, words, check(exercise, SimpleNamespace(**names)))


def page(trials: list[Trial]) -> str:
    """Returns README.md: the counts, and tables of mistakes, causes and hints."""
    known = [t for t in trials if t.words]
    unknown = [t for t in trials if not t.words]
    return f"""\
# What the checker of scratch.py says about mistakes

    python runs/workshop_checker/try_mistakes.py

{len(known)} mistakes, tried as a new user would make them: {sum(t.caught for t in known)} are \
caught, {sum(t.named for t in known)} with the true cause.

Hints come in three steps. `python scratch.py` prints the cause and a question, `--hint N 2` the
idea, `--hint N 3` the line of the solution.

| exercise | mistake | cause | question | idea | line |
| --- | --- | --- | --- | --- | --- |
{rows(known)}

## Mistakes that the checker does not know

If no known mistake gives the same answers, the checker says how the answer differs and names no
cause. {len(unknown)} such mistakes: {sum(t.caught for t in unknown)} are caught, and \
{sum(t.named for t in unknown)} are described without a cause.

| exercise | mistake | the checker says | question | idea | line |
| --- | --- | --- | --- | --- | --- |
{rows(unknown)}
"""


def rows(trials: list[Trial]) -> str:
    """Returns the rows of a table."""
    cells = ([f"{t.exercise.number}", t.what, t.said, *t.verdict.hints] for t in trials)
    return "\n".join(f"| {' | '.join(row[:-1])} | `{row[-1]}` |" for row in cells)


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page(list(try_all())), encoding="utf-8")
