"""report.html shows a token's term of the loss with the numbers of the run, to the last digit.

The expected numbers are computed here, from what `compute_loss` was given in the gradient steps.
"""

import importlib
import math
import re
import statistics
from pathlib import Path

import pytest
from test_report import CONFIG, row, trace, trained, write_report, write_run
from test_token_traces import rollouts

FLAGS = """--num-updates 1 --num-prompts 6 --group-size 8 --eval-num-tasks 0 --lr 3e-4
    --max-tokens 40""".split()
STEPS = "--num-minibatches", "4"
NUMBER = re.compile(r"[+−]?\d+(?:\.\d+)?(?:e[+−]\d+)?")
READ = """() => [...document.querySelectorAll(".open [role=option]")].map(token => {
  token.focus();
  const lines = document.querySelectorAll(".inspector [data-line]");
  return Object.fromEntries([...lines].map(line => [line.dataset.line, line.textContent]));
})"""


def watched(monkeypatch, name):
    """What each token was when a gradient step last had it, by its number: names and numbers."""
    module, seen = importlib.import_module(f"algorithms.{name}"), {}
    compute_loss = module.compute_loss

    def watch(tokens, options):
        if not tokens.logprobs.is_leaf:  # a forward pass
            columns = {k: x.detach().double().tolist() for k, x in tokens.vectors().items()}
            for i, number in enumerate(columns["number"]):
                seen[number] = {k: column[i] for k, column in columns.items()}
        return compute_loss(tokens, options)

    monkeypatch.setattr(module, "compute_loss", watch)
    return seen


def as_printed(text):
    """The number that stands there, and half a unit of its last digit."""
    text = text.replace("−", "-")
    digits, _, exponent = text.partition("e")
    decimals = len(digits.partition(".")[2]) - int(exponent or 0)
    return float(text), 0.5 * 10.0**-decimals if "." in digits else 0.0


def check(text, expected):
    """The numbers in a line of the page are these to the fourth digit, the last that stands there;
    they are recorded to six, log-probs before the update and A to six decimals."""
    found = [as_printed(x) for x in NUMBER.findall(text)]
    assert len(found) == len(expected), (text, expected)
    for (number, half), x in zip(found, expected, strict=True):
        assert abs(number - x) <= half + 1e-5 * abs(x), (text, expected)


def ratios(t, sequences):
    """ρ of the token and, for GSPO, of its sequence."""
    logs = [s["logprobs"] - s["old_logprobs"] for s in sequences[t["sequence"]]]
    return math.exp(t["logprobs"] - t["old_logprobs"]), math.exp(statistics.fmean(logs))


@pytest.mark.browser
@pytest.mark.parametrize(
    ("algo", "flags", "clip"),
    [
        ("ppo", (*STEPS, "--num-epochs", "2", "--ppo.value-clip", "0.05"), (0.2, 0.2)),
        ("variants.gspo", STEPS, (3e-4, 4e-4)),
        ("grpo", STEPS, (0.2, 0.28)),
        ("reinforce", (), None),
    ],
)
def test_the_numbers_of_the_formula_are_those_of_the_run(
    command, monkeypatch, tab, algo, flags, clip
):
    seen, name, page = watched(monkeypatch, algo), algo.split(".")[-1], tab[0]
    assert command(*FLAGS, *flags, "--algo", name, "--run-name", "a")[0] == 0
    sequences = {}
    for t in seen.values():
        sequences.setdefault(t["sequence"], []).append(t)
    page.goto(Path("runs/a/report.html").absolute().as_uri())
    rows = [r for r in rollouts("a") if r["kind"] == "train"]
    batch_mean = statistics.fmean(r["return"] for r in rows)
    count, acts, start = 0, set(), 0
    for logged in rows:
        tokens = [seen[start + i] for i in range(logged["tokens"])]
        start += logged["tokens"]
        group = [r for r in rows if r["group_id"] == logged["group_id"]]
        if "token_traces" not in logged or count >= 300:
            continue
        heads = page.locator("#groups article").filter(has_text=logged["messages"][0]["content"])
        button = heads.first.get_by_role("button", name=f"rollout {group.index(logged) + 1}:")
        if button.get_attribute("aria-expanded") != "true":
            button.click()
        after = [x for trace in logged["token_traces"] for x in trace["after"]]
        for t, lines, then in zip(tokens, page.evaluate(READ), after, strict=True):
            count += 1
            now, old, A = math.exp(t["logprobs"]), math.exp(t["old_logprobs"]), t["advantages"]
            u, w, R = t["token_weights"], t["importance_weights"], logged["return"]
            own, of_sequence = ratios(t, sequences)
            rho = of_sequence if name == "gspo" else own
            check(lines["ratio"], [rho, now, old, own] if name == "gspo" else [now, old, rho])
            check(lines["weights"], [1, 1 / u, w])
            if clip:
                low, high = 1 - clip[0], 1 + clip[1]
                clipped = min(max(rho, low), high)
                check(lines["clip"], [1, clip[0], 1, clip[1], clipped])
                surrogate = min(rho * A, clipped * A)
                parts = [rho * A, clipped * A]
                is_pushed = A != 0 and not (A > 0 and rho > high) and not (A < 0 and rho < low)
                push = u * w * rho * A * is_pushed
                acts.add((rho > high) - (rho < low) if A and not is_pushed else "unclipped")
            else:
                parts = [rho, A, t["logprobs"]]
                surrogate, push = math.prod(parts), u * w * rho * A
                check(lines["advantage"], [R, batch_mean, A, *(r["return"] for r in group)])
            check(lines["term"], [-1, 1 / u, w, *parts, -u * w * surrogate])
            words = f"Pushed {'up' if push > 0 else 'down'}" if push else "Not pushed"
            assert lines["push"].startswith(words)
            if push:
                check(lines["push"], [push])
            if name == "ppo":
                v, v0, target = t["values"], t["old_values"], t["value_targets"]
                limited = v0 + min(max(v - v0, -0.05), 0.05)
                error = max((v - target) ** 2, (limited - target) ** 2)
                check(lines["value"], [2, v0, 1, 1 / u, 0.5, v, target, 2, u * 0.5 * error / 2])
                assert (error > (v - target) ** 2 + 1e-3) <= ("value-clip" in lines["value"])
                check(lines["advantage"], [A, target - v0])
            elif clip:
                returns = [r["return"] for r in group]
                mean, std = statistics.fmean(returns), statistics.stdev(returns)
                check(lines["advantage"], [1e-4, R, mean, std, 1e-4, A, *returns])
            moved = [float(x[0]) for x in map(as_printed, NUMBER.findall(lines["moved"]))]
            steps = {"ppo": range(1, 9), "reinforce": ()}.get(name, range(1, 5))
            assert len(moved) == 2 + 2 * bool(steps) and (not steps or moved[2] in steps)
            check(lines["moved"], [old, *([now, moved[2]] if steps else []), math.exp(then)])
    assert count >= 200
    assert acts >= {"unclipped", 1, -1} if clip else not acts  # from above and from below
    page.keyboard.press("ArrowLeft")  # from the last token, which has the focus
    assert page.locator(".inspector .formula").count() == 1
    assert f"token {logged['tokens'] - 1} of" in page.inner_text(".inspector") or count >= 300


@pytest.mark.browser
@pytest.mark.parametrize(
    ("algo", "terms", "advantage", "why"),
    [
        ("grpo", {}, 1.0, "ρ is above the clip and A > 0, so clip(ρ) A acts"),
        ("grpo", {"surrogate": -3.0}, -1.0, "--grpo.dual-clip bounds its loss"),
        ("grpo", {"weight": 0.0}, 1.0, "its importance weight is 0"),
        ("grpo", {"token_weight": 0.0, "surrogate": None}, 1.0, "it is not in the loss"),
        ("grpo", {"std": 0.0}, 0.0, "A is 0, as the returns of its group are equal"),
        ("dppo", {"clipped_ratio": None}, 1.0, "m is 0, as |π − π_sampler| = 0.2318 > 0.2 and"),
    ],
)
def test_a_token_that_is_not_pushed_says_why(tab, tmp_path, algo, terms, advantage, why):
    """π_old is exp(-1), π exp(-0.5108): ρ is 1.63; the sampler's differs a little from π_old."""
    found = {"step": 1, "now": [-0.5108], "ratio": 1.63, "clipped_ratio": 1.28, "weight": 1.0,
             "token_weight": 0.25, "surrogate": 1.28, "push": 0.0, **terms}  # fmt: skip
    traced = trace(["a"], [-0.999], [-1.0], [-0.5], [advantage]) | found
    config = CONFIG | {"algo": algo, "num_epochs": 1, "num_minibatches": 2, "dppo": {"limit": 0.2},
                       "grpo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}}  # fmt: skip
    rows = [row("train", 1, 0, "a", float(i), token_traces=[traced]) for i in range(2)]
    page = tab[0]
    page.goto(write_report(write_run(tmp_path, trained(1), rows, config), config).as_uri())
    said = page.locator("[data-line=push]").inner_text()
    assert said.startswith(f"Not pushed in this step: {why}")
    assert "0.6000 at step 1" in page.locator("[data-line=moved]").inner_text()
