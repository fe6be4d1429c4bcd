"""report.html in a browser: correct, offline, usable with a keyboard; texts stay texts.

These tests need chromium and playwright and are never skipped: `pytest -m browser`.
"""

import math
import statistics

import pytest
from test_report import CONFIG, evaluated, row, trace, write_report, write_run

pytestmark = pytest.mark.browser

RETURNS = ([0.0, 1.0, 0.5], [0.25, 0.25, 0.25], [1.0, 0.2, 0.6])  # of the groups of an update
LOGPROBS = [-0.5, -0.25], [-0.5, -0.375], [-0.125, -0.75]  # sampler, trainer, after
MARKUP = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'>&lt; \ud800"
BROKEN = {"error": "ValueError: broken"}


def rollouts_of(update, returns):
    return [
        row("train", update, group, f"rollout {i} at {update}.{group} {MARKUP}", value, tokens=2,
            token_traces=[trace(["a ", " <b>"], *LOGPROBS, [value - 0.4] * 2)])
        for group, values in enumerate(returns) for i, value in enumerate(values)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The path of a report of three updates, the third with failures; its name is any legal one of
    a folder."""
    rows = rollouts_of(1, RETURNS) + rollouts_of(2, RETURNS[::-1])
    rows += [row("train", 3, 0, f"answer {i}", reward) for i, reward in enumerate((1.0, 1.0, 0.0))]
    rows += [row("train", 3, seed, "x", **BROKEN) for seed in (0, 0, 1)]
    rows += [row("eval", 0, seed, "x", 0.0) for seed in (5, 6)]
    rows += [row("eval", 3, 5, "x", 1.0), row("eval", 3, 6, "x", **BROKEN)]
    metrics = [evaluated(update, 0.2 + update / 4) for update in range(4)]
    folder = tmp_path_factory.mktemp("runs") / "a<img src=x onerror=window.ran=3>"
    return write_report(write_run(folder, metrics, rows), CONFIG)


@pytest.fixture
def page(tab, report):
    """The report in a tab, at its first update; it fetches nothing else."""
    page, requests, _ = tab
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-ready]")
    page.locator("#update").fill("0")
    assert page.locator("#at").inner_text() == "update 1 of 3"
    yield page
    assert requests == [report.as_uri()]


def test_groups_are_sorted_filtered_and_searched(page):
    for by, key in (("best", max), ("mean", statistics.fmean), ("std", statistics.stdev)):
        page.select_option("#sort", by)
        values = [*map(key, RETURNS)]
        expected = sorted(range(3), key=lambda i, values=values: -round(values[i], 9))
        shown = page.locator("#groups .prompt").all_inner_texts()
        assert [int(text.split()[1]) for text in shown] == expected
    head = page.locator("#groups article .head").first.inner_text()
    assert "std 0.50" in head  # as in the advantage
    page.select_option("#filter", label="wrong")
    assert page.locator("#groups .rollouts button").count() == 7
    page.select_option("#filter", "")
    page.fill("#search", "ROLLOUT 1 at 2.")
    assert page.locator("#count").inner_text() == "0 groups, 0 rollouts"
    page.check("#everywhere")
    assert page.locator("#count").inner_text() == "3 groups, 3 rollouts"


def test_tokens_show_their_numbers(page):
    article = page.locator("#groups article").nth(2)
    article.get_by_role("button", name="rollout 2:").click()
    article.locator("[role=option]").nth(1).click()
    inspector = article.locator(".inspector")
    names, shown = (inspector.locator(tag).all_inner_texts() for tag in ("dt", "dd"))
    numbers = {n: float(text.replace("−", "-")) for n, text in zip(names, shown, strict=True)}
    (sampler, trainer, after), a = (column[1] for column in LOGPROBS), 0.2 - 0.4
    change = after - trainer
    assert numbers == pytest.approx({
        "p, sampler": math.exp(sampler), "p, trainer before the update": math.exp(trainer),
        "p, trainer after the update": math.exp(after),
        "trainer / sampler": math.exp(trainer - sampler), "after / before": math.exp(change),
        "advantage": a, "change of log-prob": change, "advantage × change": a * change,
    }, abs=0.000051)  # fmt: skip
    assert "token 2 of 2" in inspector.inner_text() and "became less" in inspector.inner_text()


def test_failed_rollouts_are_in_no_baseline_and_no_verdict(page):
    page.locator("#update").fill("2")
    first, second = page.locator("#groups article .head").all_inner_texts()
    assert "2 of 3 correct · mean return 0.67 · std 0.58" in first and "2 failed" in first
    assert "1 failed" in second and "mean" not in second
    assert "1 went from wrong to correct, 0 from correct to wrong" in page.inner_text("#paired")
    page.select_option("#change", "")
    assert BROKEN["error"] in page.inner_text("#pairs")
