"""Unusual solutions that are right, and mistakes that core/workshop/mistakes.py does not have.

The right solutions are those furthest from ours: other precision, other algebra, other types, in
place. Of a mistake without a cause of its own the checker says the type, or what it observes.
"""

import ast
import inspect
from types import ModuleType

import pytest

from core.workshop import solutions
from core.workshop.checker import check
from core.workshop.exercises import EXERCISES

PICK = "all_logprobs.gather(-1, ids[:, None]).squeeze(-1)"
MEMBERS = "advantages[members] = centered / (returns[members].std() + 1e-4)"
CLIP = "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"

# (words of the true cause or of what is observed, or "right"; then old text, new text, .., or a
# whole body)
CASES: dict[str, list[tuple[str, ...]]] = {
    "token_logprobs": [
        ("NumPy", ".squeeze(-1)", ".squeeze(-1).detach().numpy()"),
        ("observed: the shape",
         "    return logits[:, :-1].log_softmax(-1)[:, :, input_ids[:, 1:]]\n"),
        ("observed: every number is 0.4343 times", ".log_softmax(-1)", ".softmax(-1).log10()"),
        ("right", "    import torch.nn.functional as F\n"
         "    hot = F.one_hot(input_ids[:, 1:], logits.shape[-1]).to(logits.dtype)\n"
         "    return torch.einsum('btv,btv->bt', logits[:, :-1].log_softmax(-1), hot)\n"),
    ],
    "completion_mask": [
        ("right", "    out = []\n"
         "    for c, d in turns:\n"
         "        while c: c.pop(); out.append(False)\n"
         "        while d: d.pop(); out.append(True)\n"
         "    return torch.BoolTensor(out[1:])\n"),
    ],
    "group_advantages": [
        ("observed: the function raises",
         "    means = torch.stack([returns[group_ids == g].mean() for g in group_ids.unique()])\n"
         "    return returns - means[group_ids]\n"),
        ("right", "zeros_like(returns)", "zeros_like(returns, dtype=torch.float64)", MEMBERS,
         "advantages[members] = (centered / returns[members].std()).nan_to_num().double()"),
        ("right", "    for g in set(group_ids.tolist()):\n"
         "        m = group_ids == g\n"
         "        s = returns[m].std() + 1e-4\n"
         "        returns[m] -= returns[m].mean()\n"
         "        returns[m] /= s\n"
         "    return returns\n"),
    ],
    "clipped_loss": [
        ("right", "    ts = []\n"
         "    for x, o, a in zip(logprobs[mask], old_logprobs[mask], advantages[mask]):\n"
         "        r = (x - o).exp()\n"
         "        ts.append(min(r * a, torch.clip(r, 1 - clip, 1 + clip) * a))\n"
         "    return -sum(ts) / len(ts)\n"),
    ],
    "sample": [
        ("a tuple of 2 is asked for", "return ids, " + PICK, "return ids"),
        ("right", "ids = torch.multinomial(all_logprobs.exp(), 1, generator=generator).squeeze(-1)",
         "u = torch.rand(len(logits), 1, generator=generator)\n"
         "        ids = (all_logprobs.exp().cumsum(-1) < u).sum(-1)"),
        ("right", f"return ids, {PICK}", f"return [ids.int(), {PICK}]"),
    ],
    "training_step": [
        ("right", "    loss.backward()\n" + CLIP + "    optimizer.step()", "    def closure():\n"
         "        loss.backward()\n"
         f"    {CLIP}"
         "        return loss\n"
         "    optimizer.step(closure)"),
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


@pytest.mark.parametrize("name, case", [(name, case) for name in CASES for case in CASES[name]])
def test_right_is_right_and_a_mistake_is_caught_with_its_true_cause(name, case):
    verdict, words = check(ALL[name], scratch_with(name, case[1:])), case[0]
    said = verdict.cause or f"observed: {verdict.observed}"
    assert verdict.state == ("right" if words == "right" else "wrong")
    assert words == "right" or (words in said and "; or: " not in said)
