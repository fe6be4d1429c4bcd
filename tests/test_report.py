"""Reports: the data of report.html, the table of a comparison, the README and picture of a run."""

import json
import re
import shlex

import pytest
import yaml

from core import report
from core.report import compare, curves, page
from core.report.doctor import final_lines

CONFIG = {"algo": "grpo", "env": ["adding"], "model_id": "tiny", "seed": 7, "sft_steps": 0,
          "sampler": "auto"}  # fmt: skip
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


def trace(texts, sampler, trainer, after, advantage):
    return {"text": texts, "sampler": sampler, "trainer": trainer, "after": after,
            "advantage": advantage}  # fmt: skip


def long_trace(tokens):
    return trace(["word"] * tokens, *[[-0.1234] * tokens] * 4)


def evaluated(update, accuracy):
    values = {"accuracy": accuracy, "ci_low": accuracy - 0.1, "ci_high": accuracy + 0.1}
    return {"update": update, **{f"eval/adding/{k}": v for k, v in values.items()}}


def trained(*updates):
    found = {"reward/mean": 0.5, "reward/std": 0.1, "tokens/sampled": 100}
    return [{"update": update} | found for update in updates]


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


def report_data(folder, metrics=(), rollouts=(), config=CONFIG):
    """The data in the report of a run with these metrics and rollouts."""
    path = write_report(write_run(folder, metrics, rollouts, config), config)
    assert path == folder / "report.html" and not list(folder.glob(".part-*"))
    assert path.stat().st_size <= 10_000_000
    return data_of(path)[0]


def updates_of(data, kind="train"):
    return [batch["update"] for batch in data["batches"] if batch["kind"] == kind]


def test_page_keeps_text_inside_its_data(tmp_path):
    texts = dict.fromkeys(("prompt", "agent", "error", "env"), MARKUP)
    rows = [row("train", 1, 9, f"{MARKUP}\u202e", **texts)]
    data = report_data(tmp_path, trained(1), rows, {**CONFIG, "model_id": MARKUP})
    text = (tmp_path / "report.html").read_text(encoding="utf-8")  # valid UTF-8 despite \ud800
    (raw,) = re.findall(r'application/json">(.*)</script>\s*<script>', text, re.S)
    assert not set("<>&\u2028\u2029") & set(raw) and text.count("<script") == 2
    (group,) = data["batches"][0]["groups"]
    assert (group["prompt"], group["agent"], group["env"]) == ([["user", MARKUP]], MARKUP, MARKUP)
    rollout = group["rollouts"][0]
    assert rollout["messages"] == [["assistant", f"{MARKUP}\ufffd"]] and rollout["error"] == MARKUP
    assert data["model"] == MARKUP


def test_no_text_of_a_page_is_read_as_markup():
    markup = (
        "innerHTML|outerHTML|insertAdjacentHTML|document.write|DOMParser|createContextualFragment"
    )
    assert not re.search(markup, page.TEMPLATE.read_text(encoding="utf-8"))


def test_group_is_one_task_of_one_agent_with_one_prompt(tmp_path):
    rows = [row("train", 1, seed, "x", agent=a) for seed in (1, 2) for a in ("white", "black")]
    rows += [row("train", 1, 1, "y", 1.0, agent="white", hit_token_limit=True)]
    rows += [row("train", 1, 2, "z", None, agent="black", prompt="another prompt")]
    groups = report_data(tmp_path, trained(1), rows)["batches"][0]["groups"]
    assert [(g["seed"], g["agent"], len(g["rollouts"])) for g in groups] == [
        (1, "white", 2), (1, "black", 1), (2, "white", 1), (2, "black", 2),
    ]  # fmt: skip
    assert groups[0]["prompt"] == [["user", "task 1"]]
    first, second = groups[0]["rollouts"]
    assert (first["return"], first["correct"], "hit_token_limit" in first) == (0.0, False, False)
    assert (second["return"], second["correct"], second["hit_token_limit"]) == (1.0, True, True)
    assert groups[3]["rollouts"][1]["prompt"] == [["user", "another prompt"]]


def test_messages_of_the_policy_follow_the_prompt_and_its_examples(tmp_path):
    examples = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    game = row("train", 1, 1, "first move", rewards=[0.25, 0.5])
    game["messages"] = [
        *examples, *game["messages"], {"role": "user", "content": "a reply"},
        {"role": "assistant", "content": "second move"}, {"role": "user", "content": "the end"},
    ]  # fmt: skip
    (group,) = report_data(tmp_path, trained(1), [game])["batches"][0]["groups"]
    assert [text for _, text in group["prompt"]] == ["1+1?", "2", "task 1"]
    (rollout,) = group["rollouts"]
    texts = [text for _, text in rollout["messages"]]
    assert texts == ["first move", "a reply", "second move", "the end"]
    assert rollout["rewards"] == [0.25, 0.5]


def test_results_are_the_first_and_last_evaluations(tmp_path):
    last = evaluated(3, 0.9) | trained(3)[0] | {"eval/adding/trivial": 0.25}
    metrics = [evaluated(0, 0.2), *trained(1, 2), last, *trained(4)]
    rows = [row("eval", u, seed, f"at {u}") for u in (0, 3) for seed in (1, 2)]
    data = report_data(tmp_path, metrics, rows)
    assert updates_of(data, "eval") == [0, 3]
    (result,) = data["results"]
    assert result["before"] == {"update": 0, "accuracy": 0.2, "low": 0.1, "high": 0.3,
                                "trivial": None}  # fmt: skip
    assert result["after"] == {"update": 3, "accuracy": 0.9, "low": 0.8, "high": 1.0,
                               "trivial": 0.25}  # fmt: skip
    assert (result["tokens_to_target"], data["tokens"], data["num_updates"]) == (300, 400, 4)


def test_updates_in_the_middle_are_left_out_of_a_large_page(tmp_path, monkeypatch):
    rows = [row("train", u, s, "x" * 9000, token_traces=[long_trace(2000)])
            for u in (1, 2, 3) for s in (1, 2)]  # fmt: skip
    rows.append(row("eval", 3, 1, "right"))
    assert report_data(tmp_path, trained(1, 2, 3), rows)["left_out"] == ""
    limit = page.TEMPLATE.stat().st_size + 210_000
    monkeypatch.setattr(page, "PAGE_BYTES", limit)
    data = report_data(tmp_path, trained(1, 2, 3), rows)
    assert (tmp_path / "report.html").stat().st_size <= limit
    assert (updates_of(data), updates_of(data, "eval")) == ([1, 3], [3])
    assert data["left_out"] == "the rollouts of 1 updates"
    shown = data["batches"][0]["groups"][0]["rollouts"][0]["messages"][0][1]
    assert "characters left out" in shown and shown.startswith("xxx") and shown.endswith("xxx")


def test_report_and_final_lines_have_the_warnings_the_accuracy_and_the_files(tmp_path):
    warned = [evaluated(0, 0.2), *trained(*range(1, 31))]
    warned[9]["warnings"] = {"kl_runaway": "KL <b>0.1; try less", "sampler_gap": "differ"}
    warned[30] |= evaluated(30, 0.6) | {"warnings": {"kl_runaway": "KL 0.2"}}
    data = report_data(tmp_path, warned)
    assert [tuple(warning.values()) for warning in data["warnings"]] == [
        ("kl_runaway", [9, 30], "KL <b>0.1; try less"), ("sampler_gap", [9], "differ"),
    ]  # fmt: skip
    assert "warnings" not in data["curves"]
    assert final_lines(write_run(tmp_path / "a", warned), CONFIG) == [
        "kl_runaway at update 9, 30: KL <b>0.1",
        "  next: less",
        "sampler_gap at update 9: differ",
        "Held-out accuracy on adding [95%]: 0.20 [0.10, 0.30] before RL -> 0.60 [0.50, 0.70] after "
        "30 updates",
        f"curves: {tmp_path}/a/curves.png   rollouts: {tmp_path}/a/report.html",
        f"talk to it: python -m core.chat {tmp_path}/a --before",
    ]


@pytest.mark.parametrize(
    "records",
    [[{"sft_step": 20}], [{"update": 0}, {"update": 1, "reward/mean": None, "length/mean": 3.0}]],
)
def test_pages_are_written_at_any_stage_of_a_run(tmp_path, records):
    assert report.write_pages(write_run(tmp_path, records), CONFIG) == []
    drawn = tmp_path / "curves.png"
    assert drawn.exists() == any("update" in record for record in records)
    assert not drawn.exists() or drawn.read_bytes().startswith(b"\x89PNG")
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"# {tmp_path.name}\n" in readme and "model `tiny`, seed 7" in readme
    assert data_of(tmp_path / "report.html")[0]["batches"] == []


def test_compare_prints_a_table_and_writes_one_page(tmp_path, monkeypatch, capsys):
    """A run that reached accuracy 0.9 at its second update, and one that was never evaluated."""
    good = [evaluated(0, 0.2), trained(1)[0] | {"time/train_s": 90.0}]
    good += [trained(2)[0] | evaluated(2, 0.95)]
    rows = [row("train", u, 1, f"by a at {u}", token_traces=[long_trace(9)]) for u in (1, 2)]
    two_runs = [
        write_run(tmp_path / "a", good, rows),
        write_run(tmp_path / "b", trained(1), [row("train", 1, 1, "by b")], CONFIG | {"seed": 8}),
    ]
    monkeypatch.setenv("COLUMNS", "160")
    assert compare.main([str(run) for run in two_runs]) == 0
    out = capsys.readouterr().out
    assert "0.20 [0.10, 0.30] -> 0.95 [0.85, 1.05]" in out and "not evaluated" in out
    assert str(tmp_path / "compare.html") in out.splitlines()[-1]
    first, second = data_of(tmp_path / "compare.html")
    assert (first["name"], second["name"], second["seed"]) == ("a", "b", 8)
    assert updates_of(first) == [1, 2] and updates_of(second) == [1]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_folder_in_which_one_stands_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path / "here", trained(1)))
    assert compare.main(["."]) == 0
    (run,) = data_of(tmp_path / "compare.html")
    assert run["name"] == "here" and str(tmp_path / "here") in run["command"]


def test_a_flag_that_is_always_true_where_it_is_reported_has_no_chart(tmp_path, monkeypatch):
    flag = {"info/invalid": 1.0, "reported/invalid": 3, "policy/entropy": 0.5}
    invalid, speed = [trained(1)[0] | flag], [trained(1)[0] | flag | {"info/speed": 1.0}]
    assert report_data(tmp_path / "a", speed)["reported"] == ["info/speed"]
    figures = []
    monkeypatch.setattr(curves.plt, "close", figures.append)
    for records in (invalid, speed):
        curves.draw_curves(tmp_path / "c.png", records, "a")
    panels = [figure.axes[3] for figure in figures]
    assert [[*panel.lines[0].get_ydata()] for panel in panels] == [[0.5], [1.0]]
    assert panels[1].get_title(loc="left") == "Speed"


def test_runs_of_one_name_are_told_apart(tmp_path, monkeypatch, capsys):
    figures, records = [], [evaluated(0, 0.2), *trained(1)]
    monkeypatch.setattr(curves.plt, "close", figures.append)
    monkeypatch.setenv("COLUMNS", "200")
    folders = [tmp_path / name for name in ("one/a", "two/a", "b")]
    assert compare.main([str(write_run(folder, records)) for folder in folders]) == 0
    names = [*map(str, folders)]
    assert [run["name"] for run in data_of(tmp_path / "one/compare.html")] == names
    out = capsys.readouterr().out
    assert all(name in out.replace("\n", "") for name in names)
    legend = figures[0].axes[0].get_legend().get_texts()
    assert [text.get_text() for text in legend][1:] == names


def test_compare_orders_runs_by_the_tokens_that_they_sampled_until_the_target(tmp_path):
    accuracies = {"slow": (0.4, 0.5, 0.6, 0.92), "never": (0.4, 0.7, 0.7, 0.7),
                  "fast": (0.4, 0.91, 0.6, 0.6), "worst": (0.4, 0.4, 0.4, 0.4)}  # fmt: skip
    runs = []
    for name, values in accuracies.items():
        updates = [
            evaluated(u, a) | {"tokens/sampled": 100 * (u > 0)} for u, a in enumerate(values)
        ]
        runs.append((tmp_path / name, CONFIG, updates))
    runs.append((tmp_path / "new", CONFIG, trained(1)))
    assert [(row[0], row[5]) for row in compare.table_rows(runs)] == [
        ("fast", "100"), ("slow", "300"), ("never", "not reached"), ("worst", "not reached"),
        ("new", "not reached"),
    ]  # fmt: skip


def test_the_command_that_repeats_a_run_can_be_pasted(tmp_path):
    run = write_run(tmp_path / "a 'b'", trained(1))
    assert shlex.split(data_of(write_report(run, CONFIG))[0]["command"]) == [
        "python", "train.py", "--config", str(run / "config.yaml"), "--run-name", "again",
    ]  # fmt: skip
