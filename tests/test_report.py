"""The page of a run: shows what the journal holds, and nothing that a model wrote can change it."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest

from core.report import write_report

CONFIG = {"algo": "grpo", "env": ["adding"], "model_id": "tiny", "seed": 7}
EVIL = "</div></script><script>alert(1)</script><img src=x onerror=\"a\" alt='$name'> &amp; \ud800"


def row(kind, update, seed, written, paid=0.0, asked=None, **changes):
    messages = [
        {"role": "user", "content": asked or f"task {seed}"},
        {"role": "assistant", "content": written},
    ]
    return {
        "update": update, "kind": kind, "env": "adding", "agent": "player", "seed": seed,
        "group_id": seed, "return": paid, "rewards": [paid], "tokens": 3, "cut_off": False,
        "truncated": False, "info": {"correct": paid == 1.0}, "messages": messages, **changes,
    }  # fmt: skip


def evaluated(update, accuracy):
    values = {"accuracy": accuracy, "ci_low": accuracy - 0.1, "ci_high": accuracy + 0.1}
    return {"update": update, **{f"eval/adding/{k}": v for k, v in values.items()}}


def trained(*updates):
    return [{"update": update, "reward/mean": 0.5} for update in updates]


class Outline(HTMLParser):
    """The page as a browser sees it: how often each tag opens, which stay open, the text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.seen = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.seen += data


@pytest.fixture
def report(tmp_path):
    """Write a run with these metrics and rollouts, then its report; returns the page."""

    def write(metrics=(), rollouts=(), config=CONFIG):
        for name, records in (("metrics", metrics), ("rollouts", rollouts)):
            lines = [json.dumps(record) + "\n" for record in records]
            (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        path = write_report(tmp_path, config)
        assert path == tmp_path / "report.html"
        assert not list(tmp_path.glob(".part-*"))
        return path.read_text(encoding="utf-8")

    return write


def test_report_escapes_model_text(report):
    metrics = [evaluated(0, 0.2), *trained(1), evaluated(1, 0.8)]
    page = report(
        metrics,
        [
            row("eval", 0, 5, EVIL, asked=EVIL),
            row("eval", 1, 5, EVIL, asked=EVIL),
            row("train", 1, 9, EVIL, asked=EVIL, agent=EVIL),
        ],
        {**CONFIG, "model_id": EVIL},
    )
    outline = Outline(page)
    assert outline.tags.count("script") == 1
    assert outline.tags.count("img") == 1  # the curves
    assert outline.open == []
    assert "&lt;script&gt;alert(1)" in page
    assert "$name'> &amp; ?" in outline.seen  # shown as it was written


def test_report_pairs_the_same_task_before_and_after(report):
    rollouts = [
        row("eval", 0, 1, "one before"),
        row("eval", 0, 2, "two before", 1.0),
        row("eval", 5, 3, "neither first nor last"),
        row("eval", 9, 2, "two after"),
        row("eval", 9, 1, "one after", 1.0),
        row("eval", 9, 4, "only after", 1.0),
    ]
    page = report([evaluated(0, 0.5), evaluated(5, 0.5), evaluated(9, 0.7)], rollouts)
    first, second = re.findall(r'<details class="group">.*?</details>', page)
    assert first.index("one before") < first.index("one after")
    assert second.index("two before") < second.index("two after")
    assert "✗ wrong → ✓ right · task 1" in first
    assert "✓ right → ✗ wrong · task 2" in second
    assert "2 kept here: 1 from wrong to right, 1 from right to wrong" in page
    assert "neither" not in page and "only after" not in page


def test_report_tells_accuracy_with_its_interval(report):
    page = report([evaluated(0, 0.25), evaluated(9, 0.75)])
    assert "<b>0.25 [0.15, 0.35]</b> before RL → <b>0.75 [0.65, 0.85]</b> after 9 updates" in page


def test_report_sorts_a_group_by_return(report):
    paid = {"low": 0.0, "best": 1.0, "none": None, "middle": 0.5}  # None: was not finite
    page = report(trained(1), [row("train", 1, 1, text, value) for text, value in paid.items()])
    assert re.findall(r">(best|middle|low|none)<", page) == ["best", "middle", "low", "none"]
    assert page.count(">task 1<") == 1  # the prompt once
    assert "1 of 4 right, best return 1.00" in page


def test_report_keeps_groups_and_agents_apart(report):
    rows = [row("train", 1, seed, "x", agent=a) for seed in (1, 2) for a in ("white", "black")]
    page = report(trained(1), rows)
    assert page.count('<details class="group">') == 4
    assert "white: task 1" in page and "black: task 1" in page


def test_report_shows_all_turns_and_an_opening_of_its_own(report):
    late = row("train", 1, 1, "joined late", asked="another opening")
    early = row("train", 1, 1, "first move", 1.0)
    early["messages"] += [
        {"role": "user", "content": "a reply"},
        {"role": "assistant", "content": "second move"},
    ]
    texts = re.findall(r'<div class="text">(.*?)</div>', report(trained(1), [late, early]))
    assert texts[:4] == ["task 1", "first move", "a reply", "second move"]
    assert texts[4:] == ["another opening", "joined late"]


def test_report_shows_the_first_middle_and_last_update(report):
    page = report(trained(1, 2, 3, 4, 5), [row("train", u, 1, f"w{u}") for u in range(1, 6)])
    assert re.findall(r">(w\d)<", page) == ["w1", "w3", "w5"]


def test_report_fetches_nothing(report, tmp_path):
    (tmp_path / "curves.png").write_bytes(b"a picture")
    page = report([evaluated(0, 0.2), evaluated(1, 0.8), *trained(1)], [row("train", 1, 1, "x")])
    assert not re.search(r"https?://", page)
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == [
        "data:image/png;base64," + base64.b64encode(b"a picture").decode()
    ]


def test_report_of_a_large_run_stays_below_10_mb(report):
    long = [row("train", 1, seed, "'" * 1_000_000 + "the end") for seed in range(4)]
    many = [row("train", 2, seed % 90, "'" * 8000) for seed in range(1800)]
    page = report(trained(1, 2), [*long, *many])
    assert len(page.encode()) < 10_000_000
    assert "[992007 characters left out: see rollouts.jsonl]" in page
    assert "the end<" in page
    assert re.search(r"Update 2: 90 groups.*<p>\d+ more groups are in rollouts.jsonl", page)


@pytest.mark.parametrize(
    "metrics", [[], [{"sft_step": 20, "sft/loss": 1.0}], [evaluated(0, 0.2)], trained(1, 2)]
)
def test_report_of_a_run_without_rollouts_is_a_page(report, metrics):
    assert Outline(report(metrics)).open == []


def test_report_of_an_empty_folder_is_a_page(tmp_path):
    assert "Not measured yet" in write_report(tmp_path, CONFIG).read_text(encoding="utf-8")


def test_report_leaves_out_a_line_cut_short_by_a_crash(report, tmp_path):
    report(trained(1), [row("train", 1, 1, "whole")])
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"update": 1, "kind"')
    assert ">whole<" in write_report(tmp_path, CONFIG).read_text(encoding="utf-8")
