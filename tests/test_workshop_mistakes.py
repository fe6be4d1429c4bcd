"""Mistakes as participants write them into scratch.py, and unusual solutions that are right.

Each changes the solution of one exercise; the checker sees only the resulting functions.
"""

import ast
import inspect
from types import ModuleType

import pytest

from core.workshop import solutions
from core.workshop.checker import check
from core.workshop.exercises import EXERCISES

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
SUM = "returns = (rewards * mask).sum(1)"
REINFORCE = "return -(advantages[mask] * logprobs[mask]).sum() / mask.sum()"
DELTA = "delta = rewards[t] + gamma * next_value - values[t]"
FLAGS = "torch.tensor(sampled[1:], dtype=torch.bool)"
MEAN = "return -objective.sum() / mask.sum()"
GAE_AS_LIST = """    result, next_value, later = [], 0.0, 0.0
    for t in reversed(range(len(rewards))):
        later = rewards[t] + gamma * next_value - values[t] + gamma * lam * later
        result.append(later)
        next_value = values[t]
    return {}
"""


# (what, words of the true cause or "" if the checker does not know it, old text, new text, ..), or
# (what, words, a whole body)
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
        ("logits divided by 2", "", "logits[:, :-1]", "(logits[:, :-1] / 2)"),
        ("softmax of a softmax", "applied twice", ".log_softmax(-1)",
         ".softmax(-1).log_softmax(-1)"),
        ("next token but one", "", "input_ids[:, 1:, None]", "input_ids.roll(-2, 1)[:, :-1, None]"),
        ("log of softmax + 1e-8", "small number was added", ".log_softmax(-1)",
         ".softmax(-1).add(1e-8).log()"),
        ("cross_entropy with its mean", "one number for all tokens",
         "    import torch.nn.functional as F\n"
         "    return F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())\n"),
        ("cross_entropy left flat", "observed: the shape is [6]",
         "    import torch.nn.functional as F\n"
         "    return -F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten(), "
         "reduction='none')\n"),
        ("nll_loss", "wrong sign", "    import torch.nn.functional as F\n"
         "    return F.nll_loss(logits[:, :-1].log_softmax(-1).transpose(1,2), input_ids[:, 1:], "
         "reduction='none')\n"),
        ("two aranges as an index", "observed: the function raises",
         "    lp = logits[:, :-1].log_softmax(-1)\n"
         "    B, N, V = lp.shape\n"
         "    return lp[torch.arange(B), torch.arange(N), input_ids[:, 1:]]\n"),
        ("ids as an index", "observed: the shape",
         "    return logits[:, :-1].log_softmax(-1)[:, :, input_ids[:, 1:]]\n"),
        ("largest logit subtracted", "observed: all entries are 0",
         "logits[:, :-1].log_softmax(-1)",
         "logits[:, :-1] - logits[:, :-1].max(-1, keepdim=True).values"),
        ("log10", "", ".log_softmax(-1)", ".softmax(-1).log10()"),
    ],
    "completion_mask": [
        ("not shifted", "not shifted", "sampled[1:]", "sampled"),
        ("last id dropped", "dropped the last id", "sampled[1:]", "sampled[:-1]"),
        ("shifted by roll", "roll", FLAGS, "torch.tensor(sampled).roll(-1)"),
        ("shift within each turn", "within each turn",
         "sampled += [False] * len(context) + [True] * len(completion)",
         "sampled += ([False] * len(context) + [True] * len(completion))[1:]", "sampled[1:]",
         "sampled"),
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
        ("a list", "a list", FLAGS, "sampled[1:]"),
        ("only the last token of a completion", "", "[True] * len(completion)",
         "[False] * (len(completion) - 1) + [True]"),
        ("two entries dropped", "", "sampled[1:]", "sampled[2:]"),
        ("filled up with False", "filled up at the end", FLAGS,
         "torch.tensor(sampled[1:] + [False], dtype=torch.bool)"),
        ("filled up with True", "filled up at the end", FLAGS,
         "torch.tensor(sampled[1:] + [True], dtype=torch.bool)"),
        ("filled up in front", "filled up to T entries in front", FLAGS,
         "torch.tensor([False] + sampled[1:], dtype=torch.bool)"),
        ("one False more in front", "shifted the wrong way", FLAGS,
         "torch.tensor([False] + sampled, dtype=torch.bool)"),
        ("shifted one token later", "shifted the wrong way", "sampled[1:]",
         "[False] + sampled[:-2]"),
        ("context and completion exchanged", "exchanged", "for context, completion in",
         "for completion, context in"),
        ("one True for each turn", "", "[True] * len(completion)",
         "[True] + [False] * (len(completion) - 1)"),
        ("ids instead of flags", "observed: all entries are True",
         "[False] * len(context) + [True] * len(completion)", "context + completion"),
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
        ("largest return as baseline", "", "returns[members].mean()", "returns[members].max()"),
        ("1e-4 is 0.1", "larger than 1e-4", "1e-4", "0.1"),
        ("square root of the standard deviation", "", ".std()", ".std().sqrt()"),
        ("clamped to -1/2..1/2", "", "return advantages", "return advantages.clamp(-0.5, 0.5)"),
        ("1e-4 under the root", "under the square root", MEMBERS,
         "advantages[members] = centered / (returns[members].var() + 1e-4).sqrt()"),
        ("mean / std first", "only the mean is divided", MEMBERS,
         "advantages[members] = returns[members] - returns[members].mean() / "
         "(returns[members].std() + 1e-4)"),
        ("1e-4 added to the quotient", "0 divided by 0", MEMBERS,
         "advantages[members] = centered / returns[members].std() + 1e-4"),
        ("1e-3", "larger than 1e-4", "1e-4", "1e-3"),
        ("divided by the norm", "root of the sum of squares", MEMBERS,
         "advantages[members] = centered / (centered.norm() + 1e-4)"),
        ("mean of the batch", "mean of the whole batch", "returns[members].mean()",
         "returns.mean()"),
        ("sum as baseline", "sum of the group", "returns[members].mean()",
         "returns[members].sum()"),
        ("return inside the loop", "only the first group", "    return advantages",
         "        return advantages"),
        ("result made in the loop", "only the last group",
         "    advantages = torch.zeros_like(returns)\n"
         "    for group in group_ids.unique():\n"
         "        members", "    for group in group_ids.unique():\n"
         "        advantages = torch.zeros_like(returns)\n"
         "        members"),
        ("sorted by group, then view", "neighbors", "    order = group_ids.argsort()\n"
         "    r = returns[order].view(len(group_ids.unique()), -1)\n"
         "    a = (r - r.mean(1, True)) / (r.std(1, keepdim=True) + 1e-4)\n"
         "    return a.flatten()[order.argsort()]\n"),
        ("divided by the mean", "", "(returns[members].std() + 1e-4)",
         "(returns[members].mean() + 1e-4)"),
        ("ranks", "", "    out = torch.zeros_like(returns)\n"
         "    for g in group_ids.unique():\n"
         "        m = group_ids == g\n"
         "        r = returns[m].argsort().argsort().float()\n"
         "        out[m] = (r - r.mean()) / (r.std() + 1e-4)\n"
         "    return out\n"),
        ("standard deviation of the first group", "", "returns[members].std()",
         "returns[group_ids == group_ids[0]].std()"),
        ("mean / sqrt(var + 1e-4)", "only the mean is divided",
         "    out = torch.zeros_like(returns)\n"
         "    for g in group_ids.unique():\n"
         "        m = group_ids == g\n"
         "        out[m] = returns[m] - returns[m].mean() / (returns[m].var() + 1e-4).sqrt()\n"
         "    return out\n"),
        ("population variance under the root", "population", "    out = torch.zeros_like(returns)\n"
         "    for g in group_ids.unique():\n"
         "        m = group_ids == g\n"
         "        out[m] = (returns[m] - returns[m].mean()) / (returns[m].var(correction=0) + "
         "1e-4).sqrt()\n"
         "    return out\n"),
        ("layer_norm", "population", "    import torch.nn.functional as F\n"
         "    out = torch.zeros_like(returns)\n"
         "    for g in group_ids.unique():\n"
         "        m = group_ids == g\n"
         "        out[m] = F.layer_norm(returns[m], (int(m.sum()),))\n"
         "    return out\n"),
        ("a group for each rollout", "observed: the shape is [4]", "    out = []\n"
         "    for g in group_ids:\n"
         "        r = returns[group_ids == g]\n"
         "        out.append((r - r.mean()) / (r.std() + 1e-4))\n"
         "    return torch.cat(out)\n"),
        ("group ids as an index", "observed: the function raises",
         "    means = torch.stack([returns[group_ids == g].mean() for g in group_ids.unique()])\n"
         "    stds = torch.stack([returns[group_ids == g].std() for g in group_ids.unique()])\n"
         "    return (returns - means[group_ids]) / (stds[group_ids] + 1e-4)\n"),
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
        ("probability", "probability instead", "logprobs[mask]", "logprobs[mask].exp()"),
        ("no advantages", "advantages are missing", "advantages[mask] * ", ""),
        ("no log-probs", "log-probs are missing", " * logprobs[mask]", ""),
        ("detach", "detached", "logprobs[mask]", "logprobs[mask].detach()"),
        ("a float", "a float", REINFORCE,
         "return float(-(advantages[mask] * logprobs[mask]).sum() / mask.sum())"),
        ("squared advantages", "", "(advantages[mask]", "(advantages[mask] ** 2"),
        ("half the loss", "", "return -", "return -0.5 * "),
        ("mask inverted", "mask is inverted", "[mask]", "[~mask]"),
        ("abs of the advantages", "abs took the sign of the advantages", "advantages[mask]",
         "advantages[mask].abs()"),
        ("abs of the log-probs", "abs of the log-probs", "logprobs[mask]", "logprobs[mask].abs()"),
        ("abs of the loss", "abs took the sign of the loss", REINFORCE,
         "return ((advantages[mask] * logprobs[mask]).sum() / mask.sum()).abs()"),
        ("advantage times the sum of a rollout", "one advantage is used", REINFORCE,
         "return -(advantages[:, 0] * torch.where(mask, logprobs, 0).sum(1)).mean()"),
        ("last advantage of each rollout", "one advantage is used", "advantages[mask]",
         "advantages[:, -1:].expand_as(mask)[mask]"),
        ("product of means", "means, or the sums", REINFORCE,
         "return -advantages[mask].mean() * logprobs[mask].mean()"),
        ("no sum", "observed: the shape", REINFORCE,
         "return -(advantages[mask] * logprobs[mask]) / mask.sum()"),
        ("only log-probs filled", "", REINFORCE,
         "return -(advantages * logprobs.masked_fill(~mask, 0)).sum() / mask.sum()"),
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
        ("mean of means", "each rollout's mean", SELECT, "", MEAN,
         "return -(torch.where(mask, objective, 0).sum(1) / mask.sum(1)).mean()"),
        ("clip always 0.2", "always 0.2", "clamp(1 - clip, 1 + clip)", "clamp(0.8, 1.2)"),
        ("multiplied by the mask", "multiplied by the mask", SELECT, "", "objective.sum()",
         "(objective * mask).sum()"),
        ("mask at the end", "mask was applied last", SELECT, "", "objective.sum()",
         "objective[mask].sum()"),
        ("ratio detached", "detached", ".exp()", ".exp().detach()"),
        ("a float", "a float", MEAN, "return (-objective.sum() / mask.sum()).item()"),
        ("upper bound 1.28", "", "1 + clip", "1.28"),
        ("ratio squared", "", ".exp()", ".exp() ** 2"),
        ("clipped advantage too", "", "clipped * advantages", "clipped * advantages.clamp(-1, 1)"),
        ("mean ratio of a rollout", "that of a whole rollout",
         SELECT, "", "ratio = (logprobs - old_logprobs).exp()",
         "ratio = (((logprobs - old_logprobs) * mask).sum(1,True) / "
         "mask.sum(1,True)).exp().expand_as(mask)[mask]; advantages=advantages[mask]"),
        ("ratio of a rollout", "that of a whole rollout",
         SELECT, "", "ratio = (logprobs - old_logprobs).exp()",
         "ratio = (((logprobs - old_logprobs) * mask).sum(1,True)).exp().expand_as(mask)[mask]; "
         "advantages=advantages[mask]"),
        ("loss of GSPO", "that of a whole rollout",
         "    d = torch.where(mask, logprobs - old_logprobs, 0.0)\n"
         "    r = (d.sum(1) / mask.sum(1)).exp()\n"
         "    a = advantages[:, 0]\n"
         "    return -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a).mean()\n"),
        ("ratio of the batch", "that of a whole rollout",
         "    x, o, a = logprobs[mask], old_logprobs[mask], advantages[mask]\n"
         "    r = (x.sum() - o.sum()).exp()\n"
         "    return -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a).mean()\n"),
        ("abs of the advantages", "sign of the advantages", "clipped * advantages",
         "clipped * advantages.abs()", "ratio * advantages", "ratio * advantages.abs()"),
        ("abs of each term", "sign of the loss", "-objective.sum()", "objective.abs().sum()"),
        ("abs of the loss", "sign of the loss", MEAN,
         "return (objective.sum() / mask.sum()).abs()"),
        ("abs of log ratio", "sign of log ρ", "(logprobs - old_logprobs).exp()",
         "(logprobs - old_logprobs).abs().exp()"),
        ("lower bound clip", "lower bound is clip", "1 - clip, 1 + clip", "clip, 1 + clip"),
        ("bounds exchanged", "bounds are exchanged", "1 - clip, 1 + clip", "1 + clip, 1 - clip"),
        ("upper bound 1.2", "always 0.2", "1 - clip, 1 + clip", "1 - clip, 1.2"),
        ("own log-probs as old", "always 1", "old_logprobs).exp()", "logprobs.detach()).exp()"),
        ("difference of probabilities", "difference of the probabilities",
         "(logprobs - old_logprobs).exp()", "logprobs.exp() - old_logprobs.exp()"),
        ("clipped product detached", "half of the gradient", "clipped * advantages",
         "clipped.detach() * advantages"),
        ("mean, then divided", "twice", "objective.sum()", "objective.mean()"),
        ("mask inverted", "mask is inverted", "[mask]", "[~mask]"),
        ("product clamped", "", MINIMUM, "(ratio * advantages).clamp(1 - clip, 1 + clip)"),
        ("clipped wherever A > 0", "", MINIMUM,
         "torch.where(advantages > 0, clipped, ratio) * advantages"),
        ("sums of rollouts", "that of a whole rollout",
         "    x = torch.where(mask, logprobs, 0.).sum(1); o = torch.where(mask, old_logprobs, "
         "0.).sum(1)\n"
         "    r = (x - o).exp()\n"
         "    a = advantages[:, 0]\n"
         "    return -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a).sum() / mask.sum()\n"),
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
        ("half of k3", "", K3, "return (log_r.exp() - 1 - log_r) / 2"),
        ("r squared", "", "log_r.exp()", "log_r.exp() ** 2"),
        ("r log r - r + 1", "sampled from the reference", K3,
         "r = log_r.exp(); return r * log_r - r + 1"),
        ("r detached", "only one of", K3, "return log_r.detach().exp() - 1 - log_r"),
        ("log r detached", "only one of", K3, "return log_r.exp() - 1 - log_r.detach()"),
        ("1 added", "1 was added", K3, "return log_r.exp() + 1 - log_r"),
        ("F.kl_div", "", "    import torch.nn.functional as F\n"
         "    return F.kl_div(logprobs, ref_logprobs, reduction='none', log_target=True)\n"),
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
        ("γ squared", "", "gamma * lam", "gamma * gamma * lam"),
        ("normalized", "", "return advantages", "return (advantages - advantages.mean())"),
        ("reward of the next token", "reward of the next token", "rewards[t]",
         "rewards[min(t + 1, len(rewards) - 1)]"),
        ("t = 0 left out", "t = 0 was left out", "reversed(range(len(rewards)))",
         "range(len(rewards) - 1, 0, -1)"),
        ("γ before the bracket", "γ multiplies the value of t", DELTA,
         "delta = rewards[t] + gamma * (next_value - values[t])"),
        ("γ before the reward", "γ multiplies the reward", DELTA,
         "delta = gamma * (rewards[t] + next_value) - values[t]"),
        ("sums of later rewards", "values are not used", "    out = torch.zeros_like(rewards)\n"
         "    G = 0.0\n"
         "    for t in reversed(range(len(rewards))):\n"
         "        G = rewards[t] + gamma * G\n"
         "        out[t] = G\n"
         "    return out\n"),
        ("δ kept instead of A", "only the δ of the next token", VALUES,
         "next_value, next_advantage = values[t], delta"),
        ("loop starts at N-2", "last token was left out", "range(len(rewards))",
         "range(len(rewards) - 1)"),
        ("values[t - 1]", "", "gamma * next_value", "gamma * values[t - 1]"),
        ("sign of δ", "observed: every number has the opposite sign", DELTA,
         "delta = values[t] - rewards[t] - gamma * next_value"),
        ("roll of the values", "first value is used again",
         "    d = rewards + gamma * values.roll(-1) - values\n"
         "    out = torch.zeros_like(d)\n"
         "    a = 0.\n"
         "    for t in reversed(range(len(d))):\n"
         "        out[t] = a = d[t] + gamma * lam * a\n"
         "    return out\n"),
        ("sum of all δ", "γ λ is missing",
         "    d = rewards + gamma * torch.cat([values[1:], torch.zeros(1)]) - values\n"
         "    return d.flip(0).cumsum(0).flip(0)\n"),
        ("r + γ V", "", "    N = len(rewards)\n"
         "    return rewards + gamma * torch.cat([values[1:], torch.zeros(1)])\n"),
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
        ("temperature squared", "", "logits / temperature", "logits / temperature**2"),
        ("least likely token at 0", "", "logits.argmax(-1)", "logits.argmin(-1)"),
        ("log-probs shifted by 1", "",
         "return ids, all_logprobs.gather(-1, ids[:, None]).squeeze(-1)",
         "return ids, all_logprobs.gather(-1, ids[:, None]).squeeze(-1) + 1"),
        ("softmax of probabilities", "applied twice", "torch.multinomial(all_logprobs.exp()",
         "torch.multinomial(all_logprobs.exp().softmax(-1)"),
        ("log_softmax of probabilities", "applied twice", "(logits / temperature).log_softmax(-1)",
         "(logits / temperature).softmax(-1).log_softmax(-1)"),
        ("probabilities divided", "probabilities were divided",
         "(logits / temperature).log_softmax(-1)", "(logits.softmax(-1) / temperature).log()"),
        ("log-probs divided", "no longer add up", "(logits / temperature).log_softmax(-1)",
         "logits.log_softmax(-1) / temperature"),
        ("minus log-prob", "wrong sign", "return ids, all_logprobs", "return ids, -all_logprobs"),
        ("torch.manual_seed", "seeded inside", ", generator=generator", "", "if temperature == 0:",
         "torch.manual_seed(0)\n    if temperature == 0:"),
        ("generator seeded again", "seeded inside", "if temperature == 0:",
         "generator.manual_seed(0)\n    if temperature == 0:"),
        ("log-prob 0 at temperature 0", "log-prob is 0", "    if temperature == 0:\n"
         "        return logits.argmax(-1), torch.zeros(len(logits))\n"
         "    lp = (logits / temperature).log_softmax(-1)\n"
         "    ids = torch.multinomial(lp.exp(), 1, generator=generator).squeeze(-1)\n"
         "    return ids, lp.gather(-1, ids[:, None]).squeeze(-1)\n"),
        ("row 0 for all rows", "", DRAW,
         "torch.multinomial(all_logprobs[0].exp(), len(logits), replacement=True, "
         "generator=generator)"),
        ("log-probs of row 0", "", PICK, "all_logprobs[0, ids]"),
        ("argmax, and a small temperature", "most likely token",
         "    lp = (logits / max(temperature, 1e-8)).log_softmax(-1)\n"
         "    ids = lp.argmax(-1)\n"
         "    return ids, lp.gather(-1, ids[:, None]).squeeze(-1)\n"),
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
        ("nothing returned", "None", "    return loss.item()\n", ""),
        ("two steps", "two steps", "optimizer.step()", "optimizer.step()\n    optimizer.step()"),
        ("norm of 0.5", "another number than 1", "1.0)", "0.5)"),
        ("mask inverted", "", "advantages, mask)", "advantages, ~mask)"),
        ("(-loss).backward()", "wrong direction", "loss.backward()", "(-loss).backward()"),
        ("old and new exchanged", "exchanged", "logprobs, logprobs.detach(), ",
         "logprobs.detach(), logprobs, "),
        ("advantages [B]", "one for each token", "[:, None].expand_as(logprobs)", ""),
        ("advantages [B, 1]", "one for each token", "[:, None].expand_as(logprobs)", "[:, None]"),
        ("repeat and view", "wrong order", "[:, None].expand_as(logprobs)",
         ".repeat(logprobs.shape[1]).view(logprobs.shape)"),
        ("norm of 0.1", "another number than 1", ", 1.0)", ", 0.1)"),
        ("norm of 10", "another number than 1", ", 1.0)", ", 10.0)"),
        ("backward twice", "backward was called twice", "loss.backward()",
         "loss.backward(retain_graph=True); loss.backward()"),
        ("loss after the step", "again after the step", "return loss.item()",
         "return clipped_loss(token_logprobs(model(input_ids), input_ids), logprobs.detach(), "
         "advantages, mask).item()"),
        ("minus the loss returned", "sign of the returned loss", "return loss.item()",
         "return -loss.item()"),
        ("old log-probs of a second pass", "carry a gradient", "logprobs.detach(), ",
         "token_logprobs(model(input_ids), input_ids), "),
        ("mean of the batch subtracted", "whole batch", "group_advantages(returns, group_ids)",
         "(returns - returns.mean())"),
        ("mask shifted once more", "observed: the function raises", "advantages, mask)",
         "advantages, mask[:, 1:])"),
        ("no_grad", "observed: the function raises",
         "logprobs = token_logprobs(model(input_ids), input_ids)", "\n"
         "    with torch.no_grad(): logprobs = token_logprobs(model(input_ids), input_ids)"),
        ("weights moved by hand", "observed: the shape", "optimizer.step()", "\n"
         "    with torch.no_grad():\n"
         "        for p in model.parameters(): p -= 0.1 * p.grad"),
        ("100 times the loss", "", "loss.backward()", "(loss * 100).backward()"),
        ("whole step twice", "taken twice", "\n    ", "\n        ", "        logprobs = token",
         "    for _ in range(2):\n        logprobs = token", "        return", "    return"),
        ("advantages for T tokens", "repeated T times", "[:, None].expand_as(logprobs)",
         "[:, None].repeat(1, input_ids.shape[1])"),
        ("backward without brackets", "backward was not called", "loss.backward()",
         "loss.backward"),
        ("step without brackets", "optimizer.step() was not called", "optimizer.step()",
         "optimizer.step"),
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
        ("divided by the root of the length", "", "(rewards * mask).sum(1)",
         "(rewards * mask).sum(1) / mask.sum(1).sqrt()"),
        ("half the baseline", "", "- baseline", "- baseline / 2"),
        ("mean of the others", "leave-one-out", BASELINE,
         "same = same - torch.eye(len(same)); baseline = (same @ returns) / same.sum(1)"),
        ("n - 1 in the baseline", "n - 1", BASELINE,
         "baseline = (same @ returns) / (same.sum(1) - 1)"),
        ("mean of all columns", "padding were counted", SUM, "returns = rewards.mean(1)"),
        ("sum of the group", "sum of the group", BASELINE, "baseline = same @ returns"),
        ("wrong sign", "wrong sign", LAST, "return (baseline - returns)[:, None] * mask"),
        ("mean of each rollout", "still the reward per token", SUM,
         "returns = torch.stack([r[m].mean() for r,m in zip(rewards,mask)])"),
        ("bug kept, no baseline",
         "still the reward per token, so a long answer gets less; and no baseline", SUM,
         "returns = (rewards * mask).sum(1) / mask.sum(1)", LAST, "return (returns)[:, None]*mask"),
        ("bug kept, mean of the others",
         "still the reward per token, so a long answer gets less; and the baseline is the mean of "
         "the other", SUM, "returns = (rewards * mask).sum(1) / mask.sum(1)", BASELINE,
         "baseline = (same @ returns - returns) / (same.sum(1) - 1)"),
        ("bug kept, padding counted",
         "still the reward per token, so a long answer gets less; and rewards in the padding", SUM,
         "returns = rewards.sum(1) / mask.sum(1)"),
        ("times the length", "", SUM, "returns = (rewards * mask).sum(1) * mask.sum(1)"),
        ("reward of the token", "", LAST, "return (rewards - baseline[:, None]) * mask"),
        ("mean of a row of zeros", "len(same)", "    returns = (rewards * mask).sum(1)\n"
         "    same = (group_ids[:, None] == group_ids[None, :]).float()\n"
         "    baseline = (same * returns).mean(1)\n"
         "    return (returns - baseline)[:, None] * mask\n"),
    ],
}  # fmt: skip

RIGHT: dict[str, list[tuple[str, ...]]] = {  # other solutions that are right too
    "token_logprobs": [
        ("loop", "    B, n = input_ids.shape\n"
         "    return torch.stack([torch.stack([logits[b, t].log_softmax(0)[input_ids[b, t + 1]] "
         "for t in range(n - 1)]) for b in range(B)])\n"),
        ("einsum onehot", "    import torch.nn.functional as F\n"
         "    hot = F.one_hot(input_ids[:, 1:], logits.shape[-1]).to(logits.dtype)\n"
         "    return torch.einsum('btv,btv->bt', logits[:, :-1].log_softmax(-1), hot)\n"),
        ("cross entropy", "    import torch.nn.functional as F\n"
         "    return -F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), input_ids[:, "
         "1:].reshape(-1), reduction='none').view(input_ids.shape[0], -1)\n"),
        ("float64", "logits[:, :-1]", "logits[:, :-1].double()"),
        ("logsumexp", "    x = logits[:, :-1]\n"
         "    return x.gather(-1, input_ids[:, 1:, None])[..., 0] - x.logsumexp(-1)\n"),
        ("Categorical",
         "    return torch.distributions.Categorical(logits=logits[:, :-1]).log_prob(input_ids[:, "
         "1:])\n"),
        ("f64 softmax log", "log_softmax(-1)", "double().softmax(-1).log()"),
        ("softmax then shift, slice", "    lp = logits.log_softmax(2)\n"
         "    return torch.take_along_dim(lp, input_ids.roll(-1, 1)[..., None], 2)[:, :-1, 0]\n"),
        ("arange idx", "    lp = logits[:, :-1].log_softmax(-1)\n"
         "    b = torch.arange(len(lp))[:, None]; t = torch.arange(lp.shape[1])[None]\n"
         "    return lp[b, t, input_ids[:, 1:]]\n"),
    ],
    "completion_mask": [
        ("cat",
         "    return torch.cat([torch.cat([torch.zeros(len(c)), torch.ones(len(d))]) for c, d in "
         "turns])[1:].bool()\n"),
        ("numpy", "    import numpy as np\n"
         "    return torch.from_numpy(np.concatenate([[False] * len(c) + [True] * len(d) for c, d "
         "in turns])[1:].astype(bool))\n"),
        ("repeat_interleave", "    n = torch.tensor([len(p) for turn in turns for p in turn])\n"
         "    return torch.tensor([False, True] * len(turns)).repeat_interleave(n)[1:]\n"),
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
        ("einsum", "    same = (group_ids[:, None] == group_ids[None]).float()\n"
         "    n = same.sum(1)\n"
         "    c = returns - torch.einsum('ij,j->i', same, returns) / n\n"
         "    return c / ((torch.einsum('ij,j->i', same, c ** 2) / (n - 1)).sqrt() + 1e-4)\n"),
        ("scatter", "    u, inv = group_ids.unique(return_inverse=True)\n"
         "    n = torch.bincount(inv)\n"
         "    m = torch.zeros(len(u)).index_add(0, inv, returns) / n\n"
         "    c = returns - m[inv]\n"
         "    v = torch.zeros(len(u)).index_add(0, inv, c ** 2) / (n - 1)\n"
         "    return c / (v.sqrt()[inv] + 1e-4)\n"),
        ("float64", "centered / (returns[members].std() + 1e-4)",
         "(centered.double() / (returns[members].double().std() + 1e-4)).float()"),
        ("float64 out", "torch.zeros_like(returns)",
         "torch.zeros_like(returns, dtype=torch.float64)", MEMBERS,
         "advantages[members] = (centered / (returns[members].std() + 1e-4)).double()"),
        ("eps 1e-8", "1e-4", "1e-8"),
        ("eps 2e-4", "1e-4", "2e-4"),
        ("clamp", MEMBERS,
         "advantages[members] = centered / returns[members].std().clamp(min=1e-4)"),
        ("if std 0", MEMBERS, "s = returns[members].std()\n"
         "        if s > 0: advantages[members] = centered / s"),
        ("nan_to_num", MEMBERS,
         "advantages[members] = (centered / returns[members].std()).nan_to_num()"),
        ("python statistics", "    import statistics\n"
         "    out = []\n"
         "    for r, g in zip(returns.tolist(), group_ids.tolist()):\n"
         "        mine = [x for x, h in zip(returns.tolist(), group_ids.tolist()) if h == g]\n"
         "        out.append((r - statistics.mean(mine)) / (statistics.stdev(mine) + 1e-4))\n"
         "    return torch.tensor(out)\n"),
        ("rollout loop",
         "    return torch.stack([(r - returns[group_ids == g].mean()) / (returns[group_ids == "
         "g].std() + 1e-4) for r, g in zip(returns, group_ids)])\n"),
        ("in place", "    for g in set(group_ids.tolist()):\n"
         "        m = group_ids == g\n"
         "        s = returns[m].std() + 1e-4\n"
         "        returns[m] -= returns[m].mean()\n"
         "        returns[m] /= s\n"
         "    return returns\n"),
        ("sqrt(var+1e-8)", MEMBERS,
         "advantages[members] = centered / (returns[members].var() + 1e-8).sqrt()"),
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
        ("masked_fill mean",
         "    x = logprobs.masked_fill(~mask, 0); a = advantages.masked_fill(~mask, 0)\n"
         "    return -(a * x).mean() * mask.numel() / mask.sum()\n"),
        ("einsum",
         "    return -torch.einsum('n,n->', advantages[mask], logprobs[mask]) / mask.sum()\n"),
        ("dot", "    return -torch.dot(advantages[mask], logprobs[mask]) / mask.float().sum()\n"),
        ("double", "    return -(advantages[mask].double() * logprobs[mask].double()).mean()\n"),
        ("masked_select",
         "    return (-advantages.masked_select(mask) * logprobs.masked_select(mask)).mean()\n"),
        ("nonzero", "    i = mask.nonzero(as_tuple=True)\n"
         "    return -(advantages[i].detach() * logprobs[i]).mean()\n"),
    ],
    "clipped_loss": [
        ("loop", "    total = 0.0\n"
         "    for b, t in mask.nonzero().tolist():\n"
         "        r = (logprobs[b, t] - old_logprobs[b, t]).exp()\n"
         "        a = advantages[b, t]\n"
         "        total = total - torch.min(r * a, r.clamp(1 - clip, 1 + clip) * a)\n"
         "    return total / mask.sum()\n"),
        ("where on sign", "    x, o, a = logprobs[mask], old_logprobs[mask], advantages[mask]\n"
         "    r = torch.exp(x - o)\n"
         "    return -(torch.where(a > 0, r.clamp(max=1 + clip), r.clamp(min=1 - clip)) * "
         "a).mean()\n"),
        ("exp/exp", "(logprobs - old_logprobs).exp()", "logprobs.exp() / old_logprobs.exp()"),
        ("clamp in log space", "ratio.clamp(1 - clip, 1 + clip)",
         "(logprobs - old_logprobs).clamp(torch.tensor(1 - clip).log(), torch.tensor(1 + "
         "clip).log()).exp()"),
        ("double", SELECT, "    logprobs, old_logprobs, advantages = logprobs[mask].double(), "
         "old_logprobs[mask].double(), advantages[mask].double()\n"),
        ("torch.stack min", MINIMUM,
         "torch.stack([ratio * advantages, clipped * advantages]).amin(0)"),
        ("min/max clamp", ".clamp(1 - clip, 1 + clip)",
         ".maximum(torch.tensor(1 - clip)).minimum(torch.tensor(1 + clip))"),
        ("relu form", "    x, o, a = logprobs[mask], old_logprobs[mask], advantages[mask]\n"
         "    r = (x - o).exp()\n"
         "    return -(r * a - (a * (r - 1) - clip * a.abs()).relu()).mean()\n"),
        ("max of neg", "    x, o, a = logprobs[mask], old_logprobs[mask], advantages[mask]\n"
         "    r = (x - o).exp()\n"
         "    return torch.max(-r * a, -torch.clamp(r, 1.0 - clip, 1.0 + clip) * a).mean()\n"),
        ("masked_fill with old filled",
         "    x, o, a = (t.masked_fill(~mask, 0.) for t in (logprobs, old_logprobs, advantages))\n"
         "    r = (x - o).exp()\n"
         "    return -torch.min(r * a, r.clamp(1 - clip, 1 + clip) * a).sum() / mask.sum()\n"),
        ("where one-hot unclipped",
         "    x, o, a = logprobs[mask], old_logprobs[mask], advantages[mask]\n"
         "    r = (x - o).exp()\n"
         "    dead = ((r > 1 + clip) & (a > 0)) | ((r < 1 - clip) & (a < 0))\n"
         "    c = torch.where(r > 1, 1 + clip, 1 - clip)\n"
         "    return -torch.where(dead, c * a, r * a).mean()\n"),
    ],
    "kl_k3": [
        ("expm1", K3, "return torch.expm1(log_r) - log_r"),
        ("exp/exp", K3, "r = ref_logprobs.exp() / logprobs.exp(); return r - 1 - r.log()"),
        ("double", "ref_logprobs - logprobs", "ref_logprobs.double() - logprobs.double()"),
        ("clamp 0", K3, "return (log_r.exp() - 1 - log_r).clamp(min=0)"),
        ("relu", K3, "return (log_r.exp() - 1 - log_r).relu()"),
        ("ref detach", "ref_logprobs - logprobs", "ref_logprobs.detach() - logprobs"),
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
        ("double sum", "    n = len(rewards)\n"
         "    v = torch.cat([values, torch.zeros(1)])\n"
         "    return torch.stack([sum((gamma * lam) ** (k - t) * (rewards[k] + gamma * v[k+1] - "
         "v[k]) for k in range(t, n)) for t in range(n)])\n"),
        ("recursion", "    def A(t):\n"
         "        if t == len(rewards): return 0.0\n"
         "        nv = values[t + 1] if t + 1 < len(rewards) else 0.0\n"
         "        return rewards[t] + gamma * nv - values[t] + gamma * lam * A(t + 1)\n"
         "    return torch.stack([A(t) for t in range(len(rewards))])\n"),
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
        ("row loop", "    t = temperature or 1.0\n"
         "    lp = torch.log_softmax(logits / t, -1)\n"
         "    ids = torch.stack([row.argmax() if temperature == 0 else "
         "torch.multinomial(row.exp(), 1, generator=generator)[0] for row in lp])\n"
         "    return ids, torch.stack([row[i] for row, i in zip(lp, ids)])\n"),
        ("double", "(logits / temperature)", "(logits.double() / temperature)"),
        ("softmax(logits/T)", "torch.multinomial(all_logprobs.exp(), 1",
         "torch.multinomial(torch.softmax(logits / temperature, -1), 1"),
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
        ("zero first", "    logprobs = token", "    optimizer.zero_grad()\n    logprobs = token"),
        ("repeat", "[:, None].expand_as(logprobs)", "[:, None].repeat(1, logprobs.shape[1])"),
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
        ("log-prob grad (reinforce) w value of ratio?", "return loss.item()",
         "return float(loss.detach())"),
        ("model.train", "    logprobs = token", "    model.train()\n    logprobs = token"),
        ("grad None", "optimizer.zero_grad()", "\n    for p in model.parameters(): p.grad = None"),
        ("foreach False", "1.0)", "1.0, foreach=False)"),
        ("params list from optimizer", "model.parameters()",
         "[p for g in optimizer.param_groups for p in g['params']]"),
        ("old data", "logprobs.detach(), ", "logprobs.data, "),
        ("kw", "clipped_loss(logprobs, logprobs.detach(), advantages, mask)",
         "clipped_loss(mask=mask, advantages=advantages, old_logprobs=logprobs.detach(), "
         "logprobs=logprobs)"),
    ],
    "advantages_of_tokens": [
        ("where", SUM, "returns = torch.where(mask, rewards, 0.).sum(1)"),
        ("einsum", SUM, "returns = torch.einsum('bn,bn->b', rewards, mask.float())"),
        ("loop", "    out = torch.zeros_like(rewards)\n"
         "    ret = [float(r[m].sum()) for r, m in zip(rewards, mask)]\n"
         "    for b in range(len(ret)):\n"
         "        g = [x for x, h in zip(ret, group_ids.tolist()) if h == int(group_ids[b])]\n"
         "        out[b, mask[b]] = ret[b] - sum(g) / len(g)\n"
         "    return out\n"),
        ("group loop", "    ret = (rewards * mask).sum(1)\n"
         "    adv = torch.zeros_like(ret)\n"
         "    for g in group_ids.unique():\n"
         "        m = group_ids == g\n"
         "        adv[m] = ret[m] - ret[m].mean()\n"
         "    return adv.unsqueeze(1).expand_as(mask).masked_fill(~mask, 0)\n"),
        ("double", SUM, "returns = (rewards.double() * mask).sum(1)", ".float()", ".double()"),
        ("where at end", LAST, "return torch.where(mask, (returns - baseline)[:, None], 0.0)"),
        ("mean * len", SUM, "returns = (rewards * mask).sum(1) / mask.sum(1) * mask.sum(1)"),
        ("nansum", SUM, "returns = rewards.masked_fill(~mask, float('nan')).nansum(1)"),
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
    assert words in said and "; or: " not in said and bool(words) >= bool(verdict.cause), said


@pytest.mark.parametrize("name, what, changes", flat(RIGHT))
def test_unusual_solution_is_right(name, what, changes):
    assert check(ALL[name], scratch_with(name, changes)).state == "right"
