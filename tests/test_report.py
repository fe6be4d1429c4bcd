"""Reports: the data of report.html, a comparison and a board of runs, the pages of a run."""

import importlib
import json
import re
import shlex
import sys

import pytest
import yaml

from core import report
from core.report import compare, curves, page
from core.report.doctor import final_lines

CONFIG = {"algo": "grpo", "env": ["adding"], "model_id": "tiny", "seed": 7, "sft_steps": 0,
          "eval_num_tasks": 256, "max_sampled_tokens": 0}  # fmt: skip
MARKUP = "</p></script><script>alert(1)</script><!--<img src=x onerror=a> &amp; $data \u2028 \ud800"


def row(kind, update, seed, completion, reward=0.0, prompt=None, **changes):
    """A line of rollouts.jsonl: one turn."""
    messages = [
        {"role": "user", "content": prompt or f"task {seed}"},
        {"role": "assistant", "content": completion},
    ]
    return {
        "update": update, "kind": kind, "env": "adding", "agent": "player", "seed": seed,
        "group_id": seed, "return": reward, "rewards": [reward], "tokens": 3,
        "hit_token_limit": False, "episode_truncated": False, "info": {"correct": reward == 1.0},
        "messages": messages, **changes,
    }  # fmt: skip


def trace(texts, *columns):
    return dict(zip(("text", "sampler", "trainer", "after", "advantage"), (texts, *columns),
                    strict=True))  # fmt: skip


def evaluated(update, accuracy, **more):
    values = {"accuracy": accuracy, "ci_low": accuracy - 0.1, "ci_high": accuracy + 0.1} | more
    return {"update": update, **{f"eval/adding/{k}": v for k, v in values.items()}}


def trained(*updates):
    found = {"reward/mean": 0.5, "reward/std": 0.1, "tokens/sampled": 100}
    return [{"update": update} | found for update in updates]


def run_of(*accuracies):
    """The metrics of a run that is evaluated before update 1 and after each, of 100 tokens."""
    updates = [{}, *trained(*range(1, len(accuracies)))]
    return [r | evaluated(u, a) for u, (r, a) in enumerate(zip(updates, accuracies, strict=True))]


def data_of(path):
    """The data of the runs in a page."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>',
                      path.read_text(encoding="utf-8"), re.S)  # fmt: skip
    return json.loads(found[1])["runs"]


def write_run(folder, metrics=(), rollouts=(), config=CONFIG):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    for name, records in (("metrics", metrics), ("rollouts", rollouts)):
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def write_report(run, config):
    return page.write_page(run / "report.html", [(run, config)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of thirty updates, two of which have warned, with its page. Rollouts
    are of two updates: groups of two agents, a game after an example; another's texts."""
    rows = [row("train", 1, seed, "x", agent=a) for seed in (1, 2) for a in ("white", "black")]
    rows += [row("train", 1, 1, "y", 1.0, agent="white", hit_token_limit=True)]
    rows += [row("train", 1, 2, "z", None, agent="black", prompt="another prompt")]
    game = row("train", 1, 3, "first move", rewards=[0.25, 0.5])
    example = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    later = [{"role": "user", "content": "a reply"}, {"role": "assistant", "content": "more"}]
    game["messages"] = [*example, *game["messages"], *later]
    texts = dict.fromkeys(("prompt", "agent", "error", "env"), MARKUP)
    rows += [game, row("train", 2, 9, f"{MARKUP}\u202e", **texts)]
    records = [evaluated(0, 0.2), *trained(*range(1, 31))]
    records[9]["warnings"] = {"kl_runaway": "KL <b>0.1; next: less", "sampler_gap": "differ"}
    records[30] |= evaluated(30, 0.6) | {"warnings": {"kl_runaway": "KL 0.2"}}
    config = CONFIG | {"model_id": MARKUP}
    folder = write_run(tmp_path_factory.mktemp("runs") / "a", records, rows, config)
    write_report(folder, config)
    return folder


@pytest.fixture(scope="module")
def data(run):
    return data_of(run / "report.html")[0]


def test_text_of_others_stays_text(run, data):
    text = (run / "report.html").read_text(encoding="utf-8")  # valid UTF-8 despite \ud800
    (raw,) = re.findall(r'application/json">(.*)</script>\s*<script>', text, re.S)
    assert not set("<>&\u2028\u2029") & set(raw) and text.count("<script") == 2
    (group,) = data["batches"][1]["groups"]
    assert (group["prompt"], group["agent"], group["env"]) == ([["user", MARKUP]], MARKUP, MARKUP)
    rollout = group["rollouts"][0]
    assert rollout["messages"] == [["assistant", f"{MARKUP}\ufffd"]] and rollout["error"] == MARKUP
    assert data["model"] == MARKUP
    markup = "innerHTML|outerHTML|insertAdjacentHTML|document.write|DOMParser|createContextual"
    assert not re.search(markup, page.TEMPLATE.read_text(encoding="utf-8"))


def test_a_group_is_one_task_of_one_agent_and_messages_follow_the_prompt(data):
    groups = data["batches"][0]["groups"]
    assert [(g["seed"], g["agent"], len(g["rollouts"])) for g in groups] == [
        (1, "white", 2), (1, "black", 1), (2, "white", 1), (2, "black", 2), (3, "player", 1),
    ]  # fmt: skip
    second = groups[0]["rollouts"][1]
    assert (second["return"], second["correct"], second["hit_token_limit"]) == (1.0, True, True)
    assert groups[3]["rollouts"][1]["prompt"] == [["user", "another prompt"]]
    assert [text for _, text in groups[4]["prompt"]] == ["1+1?", "2", "task 3"]
    (rollout,) = groups[4]["rollouts"]
    assert [text for _, text in rollout["messages"]] == ["first move", "a reply", "more"]
    assert rollout["rewards"] == [0.25, 0.5]


def test_the_report_and_the_final_lines_have_the_warnings(run, data):
    assert [tuple(warning.values()) for warning in data["warnings"]] == [
        ("kl_runaway", [9, 30], "KL <b>0.1; next: less"), ("sampler_gap", [9], "differ"),
    ]  # fmt: skip
    assert "warnings" not in data["curves"]
    accuracies = [data["results"][0][end]["accuracy"] for end in ("before", "after")]
    assert (accuracies, data["num_updates"]) == ([0.2, 0.6], 30)
    assert final_lines(run, CONFIG)[:3] == [
        "sampler_gap at update 9: differ",  # a cause before its consequence
        "kl_runaway at update 9, 30: KL <b>0.1",
        "  next: less",
    ]


def test_updates_in_the_middle_are_left_out_of_a_large_page(tmp_path, monkeypatch):
    long = trace(["word"] * 2000, *[[-0.1234] * 2000] * 4)
    rows = [row("train", u, s, "x" * 9000, token_traces=[long]) for u in (1, 2, 3) for s in (1, 2)]
    write_run(tmp_path, trained(1, 2, 3), [*rows, row("eval", 3, 1, "right")])
    assert page.pack_rollouts(tmp_path, 10**7)[1] == ""
    limit = page.TEMPLATE.stat().st_size + 400_000
    monkeypatch.setattr(page, "PAGE_BYTES", limit)
    (data,) = data_of(write_report(tmp_path, CONFIG))
    assert (tmp_path / "report.html").stat().st_size <= limit
    kept = [(batch["kind"], batch["update"]) for batch in data["batches"]]
    assert kept == [("train", 1), ("train", 3), ("eval", 3)]
    assert data["left_out"] == "the rollouts of 1 of 4 updates and evaluations"
    shown = data["batches"][0]["groups"][0]["rollouts"][0]["messages"][0][1]
    assert "characters left out" in shown and shown.startswith("xxx") and shown.endswith("xxx")


@pytest.mark.parametrize("records", [
    [{"sft_step": 20}],
    [evaluated(0, 0.2, trivial=0.1), {"update": 1, "reward/mean": None, "info/$\\frac{_a": 1.0}],
])  # fmt: skip
def test_pages_are_written_at_any_stage_of_a_run_without_pyplot(tmp_path, monkeypatch, records):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # it would change the backend
    importlib.reload(curves)
    monkeypatch.setitem(curves.matplotlib.rcParams, "text.usetex", True)  # LaTeX may be missing
    run = write_run(tmp_path / "a 'b'", records)
    assert report.write_pages(run, CONFIG) == [] and not list(run.glob(".part-*"))
    assert (run / "curves.png").exists() == any("update" in record for record in records)
    (data,), readme = data_of(run / "report.html"), (run / "README.md").read_text(encoding="utf-8")
    command = ["train.py", "--config", str(run / "config.yaml"), "--run-name", "again"]
    assert shlex.split(data["command"])[1:] == command  # can be pasted
    assert data["command"] in readme and ("0.20 [0.10, 0.30]" in readme) == (len(records) == 2)


def test_compare_orders_runs_by_tokens_and_writes_one_page(tmp_path, capsys):
    runs = {
        "x/slow": run_of(0.4, 0.5, 0.6, 0.92), "never": run_of(0.4, 0.7, 0.7, 0.7),
        "y/slow": run_of(0.4, 0.91, 0.6), "worst": run_of(0.4, 0.4), "new": trained(1),
    }  # fmt: skip
    folders = [str(write_run(tmp_path / name, metrics)) for name, metrics in runs.items()]
    assert compare.main(folders) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    order = [folders[i] for i in (2, 0, 1, 3)]  # one is not evaluated
    assert title == "adding" and [line.split("  ")[2].split(":")[0] for line in lines[:4]] == order
    assert lines[1].startswith("  0.40 [0.30, 0.50] -> 0.92 [0.82, 1.02]  ")
    assert "0.9 after 300 tokens; 300 tokens" in lines[1] and "not reached" in lines[2]
    assert [run["name"] for run in data_of(tmp_path / "x/compare.html")] == folders
    for wrong in ([str(tmp_path / "none")], folders[4:], []):
        assert compare.main(wrong) == 2


def test_a_board_has_the_runs_of_one_environment_and_budget(tmp_path, capsys, monkeypatch):
    """Those without a budget, and folders that are no runs, are left out."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "base", run_of(0.2))
    for name, accuracy, budget in (("a", 0.9, 100), ("b", 0.95, 100), ("c", 0.5, 50)):
        config = CONFIG | {"max_sampled_tokens": budget}
        write_run(tmp_path / name, run_of(0, accuracy), config=config)
    (tmp_path / "page").mkdir()
    assert compare.main(["--board", "*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "adding, 256 held-out tasks, 100 sampled tokens",
        "  0.00 [-0.10, 0.10] -> 0.95 [0.85, 1.05]  b",
        "  0.00 [-0.10, 0.10] -> 0.90 [0.80, 1.00]  a",
        "adding, 256 held-out tasks, 50 sampled tokens",
        "  0.00 [-0.10, 0.10] -> 0.50 [0.40, 0.60]  c",
    ]
    assert compare.main(["--board", "base"]) == 2
