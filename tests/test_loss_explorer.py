"""The loss explorer of report.html computes what algorithms/ computes, in a browser.

These tests need chromium and playwright and are never skipped: `pytest -m browser`.
"""

import random
from types import SimpleNamespace

import pytest
import torch
from test_report import row, trace, trained, write_run
from test_report_browser import tab, visit  # noqa: F401  (fixtures)

import train
from algorithms import common, grpo, off_policy, ppo
from algorithms.variants import cispo, gspo
from core import config
from core.batching import TENSORS, cut, to_rollout_batch
from core.config import Config
from core.report.page import write_report
from core.run.folder import config_to_dict
from core.types import Rollout, Turn

pytestmark = pytest.mark.browser

READ = """() => [...document.querySelectorAll("#groups article")].reverse().flatMap(article =>
    [...article.querySelectorAll(".rollouts button")].filter(
        button => !button.ariaLabel.includes("failed")).flatMap(button => {
        if (button.ariaExpanded !== "true") button.click();
        return [...article.querySelectorAll("[role=option]")].map((token, i) => {
            token.focus();
            const rows = [...article.querySelector(".inspector table").rows].slice(1);
            return { rollout: article.querySelector(".prompt").textContent + " " + button.ariaLabel,
                     token: i, changed: token.classList.contains("changed"),
                     clipped: token.classList.contains("clipped"),
                     chosen: rows.map(row => row.cells[1].textContent),
                     own: rows.map(row => row.cells[2].textContent) };
        });
    }))"""
SINGLE = {"credit": "episode", "max_tokens": 9}
TURNS = {"credit": "turn", "gamma": 0.9, "max_tokens": 9, "tis_level": "geometric",
         "tis_mode": "mask", "tis_cap": 1.01, "reward_coef": 0.5,
         "mask_truncated_completions": True}  # fmt: skip


def rollout(rng, group, turns):
    """Three to six tokens per turn; each turn has a prompt of its own, so a sequence of its own."""
    made = []
    for turn in range(turns if rng.random() < 0.7 else 1):
        ids = [rng.randrange(40, 90) for _ in range(rng.randrange(3, 7))]
        sampler = [-round(rng.expovariate(1), 4) for _ in ids]
        finish = "length" if rng.random() < 0.3 else "stop"
        reward = 0.5 if group == 3 else round(rng.random(), 3)  # group 3 has no spread
        made.append(Turn([turn], ids, sampler, finish, reward))
    return Rollout("adding", "player", group, group, turns=made)


def recorded_run(folder, settings, algo="grpo", options=None, turns=1):
    """A run of one update with 4 groups of 3 rollouts, one of which failed; the last two groups
    have no token traces. Returns (config, rollouts trained on, their log-probs, report)."""
    rng = random.Random(1)
    cfg = config.resolve(Config(algo=algo, options=options, **settings))
    kept = [rollout(rng, group, turns) for group in (1, 2, 3, 4) for _ in range(3)]
    batch = to_rollout_batch(kept)
    noise = [torch.tensor([[rng.gauss(0, std) for _ in line] for line in batch.completion_mask])
             for std in (0.01, 0.3)]  # fmt: skip
    batch.old_logprobs = ((batch.sampler_logprobs + noise[0]) * 1e4).round() / 1e4
    after = ((batch.old_logprobs + noise[1]) * 1e4).round() / 1e4
    train.shape_rewards(cfg, batch)
    lines = []
    options = cfg.options if algo == "grpo" else grpo.Options("grpo", "group")
    recorded = grpo.compute_advantages(batch, options)
    for r in kept:
        line = row("train", 1, r.seed, "", round(r.episode_return, 3))
        line |= {"rewards": [t.reward for t in r.turns], "tokens": r.num_tokens,
                 "hit_token_limit": any(t.finish_reason == "length" for t in r.turns)}  # fmt: skip
        line["messages"] = [{"role": "user", "content": f"task {r.seed}"}]
        line["messages"] += [{"role": "assistant", "content": "x"} for _ in r.turns]
        if r.group_id < 3:
            i, start, line["token_traces"] = kept.index(r), 0, []
            for number, turn in enumerate(r.turns):
                at = (i, slice(start, start := start + len(turn.completion_ids)))
                columns = [x[at].tolist() for x in (batch.old_logprobs, after, recorded)]
                texts = [chr(token) for token in turn.completion_ids]
                line["token_traces"].append(trace(texts, turn.sampler_logprobs, *columns))
                if len(r.turns) > 1:
                    line["token_traces"][-1]["sequence"] = [number] * len(texts)
        lines.append(line)
    lines.append(row("train", 1, 1, "failed", 50.0, error="no answer"))
    path = write_report(write_run(folder, trained(1), lines, config_to_dict(cfg)),
                        config_to_dict(cfg))  # fmt: skip
    return SimpleNamespace(cfg=cfg, kept=kept, batch=batch, after=after, recorded=recorded,
                           path=path)  # fmt: skip


def expected(run, algo, options, tis_cap, moved, advantages=None):
    """The numbers of each token by rollout, as algorithms/ computes them and as train.py calls it:
    {rollout: [(ratio, clipped, advantage, importance weight, token weight, gradient)]}."""
    batch, cfg = run.batch, run.cfg
    batch.advantages = advantages
    if advantages is None:
        batch.advantages = grpo.compute_advantages(batch, options)
    batch.token_weights = common.token_weights(
        batch.loss_mask, options.aggregation, cfg.max_tokens, None, batch.group_ids
    )
    columns = [torch.zeros_like(batch.old_logprobs) for _ in range(3)]
    for micro in cut(batch.sequences, 10**6):
        for name in TENSORS:
            values = getattr(batch, name)
            setattr(micro, name, None if values is None else micro.gather(values))
        change = micro.gather(run.after - batch.old_logprobs)
        logprobs = (micro.old_logprobs + moved * change).requires_grad_()
        ratio = off_policy.sampler_ratio(micro, cfg.tis_level)
        weights = off_policy.importance_weights(ratio, tis_cap, cfg.tis_mode)
        micro.importance_weights = weights
        loss, _ = algo.compute_loss(logprobs, None, micro, options)
        loss.backward()
        log_ratio = (logprobs - micro.old_logprobs).detach()
        if algo is gspo:
            log_ratio = common.masked_mean(log_ratio, micro.completion_mask, dim=1)
        ratio = log_ratio.exp().expand_as(logprobs)
        for values, into in zip((ratio, weights, -logprobs.grad), columns, strict=True):
            micro.scatter(values, into=into)
    found = {}
    for i, r in enumerate(run.kept):
        if r.group_id < 3:
            number = [other for other in run.kept if other.group_id == r.group_id].index(r) + 1
            places = batch.completion_mask[i].nonzero().flatten().tolist()
            found[f"task {r.seed} rollout {number}"] = [
                tuple(x[i, j].item() for x in (columns[0], batch.advantages, columns[1],
                                               batch.token_weights, columns[2]))
                for j in places
            ]  # fmt: skip
    return found


def number(text):
    top, _, bottom = text.replace("−", "-").replace(",", "").partition("/")
    return float(top) / float(bottom or 1)


def open_explorer(page):
    page.locator(".explore summary").click()
    page.locator(".explore [role=status]:not(:empty)").wait_for()  # the toggle event comes later


def choose(page, loss_type, changes):
    page.select_option("select[name=loss_type]", loss_type)
    page.locator("input[name=moved]").fill("1")
    for name, value in changes.items():
        if name in ("scale_rewards", "aggregation"):
            page.select_option(f"select[name={name}]", value)
        else:
            page.locator(f"input[name={name}]").fill(str(value))


def compare(page, run, algo, options, tis_cap=2.0, moved=1.0, advantages=None, column="chosen"):
    """Compares each token of the page with `expected`. Returns what the page showed."""
    want = expected(run, algo, options, tis_cap, moved, advantages)
    shown = page.evaluate(READ)
    assert len(shown) == sum(map(len, want.values())) > 20
    for token in shown:
        ratio, advantage, weight, token_weight, push = want[token["rollout"].split(":")[0]][
            token["token"]
        ]
        found = token[column]
        numbers = [number(x) for i, x in enumerate(found) if i != 1]
        assert numbers == pytest.approx(
            [ratio, advantage, weight, token_weight, push], rel=6e-4, abs=1e-9
        )
        beyond_high, beyond_low = ratio > 1 + options.clip_high, ratio < 1 - options.clip_low
        if algo is cispo:
            clipped = beyond_high or beyond_low
        else:
            clipped = (beyond_high and advantage > 0) or (beyond_low and advantage < 0)
            if clipped:
                assert push == 0
        assert found[1] == ("yes" if clipped else "no")
    return shown


CASES = [  # what is chosen in the page, beside --tis-cap and `moved` as options of GRPO
    ("", {}),
    ("grpo", {"clip_low": 0.05, "clip_high": 0.02}),
    ("dapo", {"moved": 0}),
    ("dapo", {"scale_rewards": "none", "moved": 3, "aggregation": "constant", "tis_cap": 0}),
    ("gspo", {}),
    ("scalerl", {"clip_high": 0.05}),
    ("max_rl", {}),
]


@pytest.mark.parametrize(("settings", "turns"), [(SINGLE, 1), (TURNS, 2)], ids=["single", "turns"])
def test_explorer_shows_the_numbers_of_the_algorithms(tmp_path, visit, settings, turns):  # noqa: F811
    run = recorded_run(tmp_path / "a", settings, turns=turns)
    page = visit(run.path)
    open_explorer(page)
    own_cap = settings.get("tis_cap", 2.0)
    for loss_type, changes in CASES:
        page.get_by_role("button", name="reset to this run's").click()
        choose(page, loss_type, changes)
        given = {k: v for k, v in changes.items() if k not in ("tis_cap", "moved")}
        algo = {"gspo": gspo, "scalerl": cispo}.get(loss_type, grpo)
        options = gspo.Options(**given)
        if algo is not gspo:
            options = algo.resolve(algo.Options(loss_type or "dapo", **given))
        moved, cap = changes.get("moved", 1.0), changes.get("tis_cap", own_cap)
        compare(page, run, algo, options, cap, moved)
        own = compare(page, run, grpo, run.cfg.options, own_cap, moved, column="own")
        for token in own:  # only tokens with another gradient have the mark
            a, b = number(token["chosen"][5]), number(token["own"][5])
            assert token["changed"] or a == b
            assert token["clipped"] == (token["chosen"][1] == "yes" and a == 0)
        differ = sum(token["changed"] for token in own)
        assert f"the update: {differ} of {len(own)} gradients differ" in page.locator(
            ".explore [role=status]").inner_text()  # fmt: skip
        assert (differ > 0) == ((loss_type, changes) not in (CASES[0], CASES[2]))


def test_explorer_starts_from_the_loss_of_other_algorithms(tmp_path, visit):  # noqa: F811
    as_ppo = grpo, grpo.Options("grpo", clip_low=0.1, clip_high=0.1, aggregation="token")
    as_reinforce = cispo, cispo.Options(clip_high=1e9)
    for algo, options, (module, equal) in (
        ("ppo", ppo.Options(clip=0.1), as_ppo), ("reinforce", None, as_reinforce),
    ):  # fmt: skip
        run = recorded_run(tmp_path / algo, SINGLE, algo, options)
        page = visit(run.path)
        open_explorer(page)
        rounded = (run.recorded * 1e4).round() / 1e4
        compare(page, run, module, module.resolve(equal), 2.0, 1.0, rounded)


def test_without_a_known_loss_the_page_shows_the_recorded_tokens_only(tmp_path, visit):  # noqa: F811
    cfg = {"algo": "/home/me/mine.py", "env": ["adding"], "model_id": "tiny", "seed": 7}
    line = row("train", 1, 1, "ab", 1.0, token_traces=[trace(["a", "b"], *[[-0.5, -0.25]] * 4)])
    page = visit(write_report(write_run(tmp_path / "a", trained(1), [line], cfg), cfg))
    page.locator("#groups .rollouts button").first.click()
    shown = page.locator(".open").inner_text()
    assert "does not know the loss of mine. It shows the recorded tokens only." in shown
    assert page.locator(".explore").count() == 0 and "change of log-prob" in shown
