"""report.html in a browser: correct, offline, usable with a keyboard; texts stay texts.

These tests need chromium and playwright and are never skipped: `pytest -m browser`.
"""

import math
import random
import statistics

import pytest
from test_report import CONFIG, evaluated, row, trace, write_report, write_run

pytestmark = pytest.mark.browser

UPDATES, GROUPS, ROLLOUTS, TOKENS = 10, 5, 6, 16
MARKUP = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'>&lt; \ud800"
NAME = "a<img src=x onerror=window.ran=3>"  # of a run: any legal name of a folder


def rollouts_of(update, rng):
    """Groups of rollouts with token traces; group 3 has equal returns."""
    rows = []
    for group in range(GROUPS):
        for i in range(ROLLOUTS):
            value = 0.5 if group == 3 else rng.choice([0.0, 0.1, round(rng.random(), 3), 1.0])
            texts = [rng.choice(["a ", "r1", " <b>", "\n", "&amp;", "é"]) for _ in range(TOKENS)]
            columns = [[-round(rng.random(), 4) for _ in texts] for _ in range(3)]
            traces = [trace(texts, *columns, [round(value - 0.4, 4)] * TOKENS)]
            traces = [] if (update, group) == (UPDATES, 4) else traces  # beyond MAX_TOKENS
            rows.append(row("train", update, group, f"rollout {i} at {update}.{group}", value,
                            tokens=TOKENS, token_traces=traces,
                            hit_token_limit=rng.random() < 0.1))  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(path of a report, its rollouts)"""
    rng, rows = random.Random(0), []
    metrics = [evaluated(update, 0.2 + update / 20) for update in range(UPDATES + 1)]
    for update in (0, UPDATES):
        for seed in range(8):
            text, correct = f"at {update} {MARKUP * 9}", float(rng.random() < 0.5)
            rows.append(row("eval", update, seed, text, correct))
    for update in range(1, UPDATES + 1):
        rows += rollouts_of(update, rng)
    folder = write_run(tmp_path_factory.mktemp("runs") / NAME, metrics, rows)
    return write_report(folder, {**CONFIG, "eval_num_tasks": 256}), rows


@pytest.fixture
def page(tab, run):
    """The report in a tab; it fetches nothing else."""
    page, requests, _ = tab
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(run[0].as_uri())
    page.wait_for_selector("html[data-ready]")
    yield page
    assert requests == [run[0].as_uri()]


def groups_of(rows, update):
    return [[r for r in rows if (r["kind"], r["update"], r["group_id"]) == ("train", update, group)]
            for group in range(GROUPS)]  # fmt: skip


def choose_update(page, update):
    page.locator("#update").fill(str(update - 1))
    assert page.locator("#at").inner_text() == f"update {update} of {UPDATES}"


def test_groups_are_sorted_filtered_and_searched(run, page):
    choose_update(page, 7)
    groups = groups_of(run[1], 7)
    for by, key in (("best", max), ("mean", statistics.fmean), ("std", statistics.stdev)):
        page.select_option("#sort", by)
        values = [key([r["return"] for r in group]) for group in groups]
        expected = sorted(range(GROUPS), key=lambda i, values=values: -round(values[i], 9))
        shown = page.locator("#groups .prompt").all_inner_texts()
        assert [int(text.split()[1]) for text in shown] == expected != [*range(GROUPS)]
    head = page.locator("#groups article .head").first.inner_text()
    assert f"std {values[expected[0]]:.2f}" in head  # as in the advantage
    page.select_option("#filter", label="wrong")
    wrong = [r for group in groups for r in group if not r["info"]["correct"]]
    assert page.locator("#groups .rollouts button").count() == len(wrong)
    page.select_option("#filter", "")
    page.fill("#search", "ROLLOUT 3 at 8.")
    assert page.locator("#count").inner_text() == "0 groups, 0 rollouts"
    page.check("#everywhere")
    assert page.locator("#count").inner_text() == f"{GROUPS} groups, {GROUPS} rollouts"


def test_tokens_show_their_numbers(run, page):
    choose_update(page, 6)
    article = page.locator("#groups article").nth(2)
    article.get_by_role("button", name="rollout 5:").click()
    values = groups_of(run[1], 6)[2][4]["token_traces"][0]
    article.locator("[role=option]").nth(9).click()
    inspector = article.locator(".inspector")
    names, shown = (inspector.locator(tag).all_inner_texts() for tag in ("dt", "dd"))
    numbers = {n: float(text.replace("−", "-")) for n, text in zip(names, shown, strict=True)}
    sampler, trainer, after, a = (
        values[n][9] for n in ("sampler", "trainer", "after", "advantage")
    )
    change = after - trainer
    assert numbers == pytest.approx({
        "p, sampler": math.exp(sampler), "p, trainer before the update": math.exp(trainer),
        "p, trainer after the update": math.exp(after),
        "trainer / sampler": math.exp(trainer - sampler), "after / before": math.exp(change),
        "advantage": a, "change of log-prob": change, "advantage × change": a * change,
    }, abs=0.000051)  # fmt: skip
    text = inspector.inner_text()
    assert f"token 10 of {TOKENS}" in text and f"became {'more' if change > 0 else 'less'}" in text


def test_failed_rollouts_are_in_no_baseline_and_no_verdict(tab, tmp_path):
    rows = [row("train", 1, 0, f"answer {i}", reward) for i, reward in enumerate((1.0, 1.0, 0.0))]
    rows += [row("train", 1, seed, "x", error="ValueError: broken") for seed in (0, 0, 1)]
    rows += [row("eval", 0, seed, "x", 0.0) for seed in (5, 6)]
    rows += [row("eval", 1, 5, "x", 1.0), row("eval", 1, 6, "x", error="ValueError: broken")]
    metrics = [evaluated(0, 0.0), evaluated(1, 0.5)]
    page = tab[0]
    page.goto(write_report(write_run(tmp_path / "run", metrics, rows), CONFIG).as_uri())
    page.wait_for_selector("html[data-ready]")
    first, second = (
        a.locator(".head").first.inner_text() for a in page.locator("#groups article").all()
    )
    assert "2 of 3 correct · mean return 0.67 · std 0.58" in first and "2 failed" in first
    assert "1 failed" in second and "mean" not in second
    assert "1 went from wrong to correct, 0 from correct to wrong" in page.inner_text("#paired")
    page.select_option("#change", "")
    assert "ValueError: broken" in page.inner_text("#pairs")
