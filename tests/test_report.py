"""The data of a run's page: what the journal holds, whole where it fits, and nothing breaks out."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from core import run_log
from core.report import compare
from core.report.compare import write_comparison, write_report
from core.run_dir import write_config
from core.run_log import Journal
from core.types import Rollout, Turn, UsageError

CONFIG = {"algo": "grpo", "env": ["adding"], "model_id": "tiny", "seed": 7}
EVIL = "</div></script><script>alert(1)</script><!--<img src=x onerror=a> &amp; $data \u2028 \ud800"


def row(kind, update, seed, written, paid=0.0, asked=None, **changes):
    messages = [
        {"role": "user", "content": asked or f"task {seed}"},
        {"role": "assistant", "content": written},
    ]
    return {
        "update": update, "kind": kind, "env": "adding", "agent": "player", "seed": seed,
        "group_id": seed, "return": paid, "rewards": [paid], "tokens": 3, "hit_token_limit": False,
        "episode_truncated": False,
        "info": {"correct": paid == 1.0}, "messages": messages, **changes,
    }  # fmt: skip


def trace_tokens(texts, sampler, trainer, after, advantage):
    return {"text": texts, "sampler": sampler, "trainer": trainer, "after": after,
            "advantage": advantage}  # fmt: skip


def long_trace_tokens(tokens):
    return trace_tokens(["word"] * tokens, *[[-0.1234] * tokens] * 4)


def evaluated(update, accuracy):
    values = {"accuracy": accuracy, "ci_low": accuracy - 0.1, "ci_high": accuracy + 0.1}
    return {"update": update, **{f"eval/adding/{k}": v for k, v in values.items()}}


def trained(*updates):
    return [{"update": update, "reward/mean": 0.5, "tokens/sampled": 100} for update in updates]


def data_of(page):
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    return json.loads(found)["runs"]


def write_run(folder, metrics=(), rollouts=(), config=CONFIG):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for name, records in (("metrics", metrics), ("rollouts", rollouts)):
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def shown(tmp_path):
    """Write a run with these metrics and rollouts, then its report; returns the data in it."""

    def write(metrics=(), rollouts=(), config=CONFIG):
        path = write_report(write_run(tmp_path, metrics, rollouts, config), config)
        assert path == tmp_path / "report.html" and not list(tmp_path.glob(".part-*"))
        assert path.stat().st_size <= 10_000_000
        return data_of(path.read_text(encoding="utf-8"))[0]

    return write


def updates_of(data, kind="train"):
    return [segment["u"] for segment in data["segments"] if segment["k"] == kind]


def test_text_cannot_end_the_script_and_arrives_as_it_was(shown, tmp_path):
    rows = [row("train", 1, 9, EVIL, asked=EVIL, agent=EVIL, error=EVIL, env=EVIL)]
    data = shown(trained(1), rows, {**CONFIG, "model_id": EVIL})
    page = (tmp_path / "report.html").read_text(encoding="utf-8")  # valid UTF-8 in spite of \ud800
    (raw,) = re.findall(r'application/json">(.*)</script>\s*<script>', page, re.S)
    assert not set("<>&\u2028\u2029") & set(raw)
    assert page.count("<script") == 2
    (group,) = data["segments"][0]["g"]
    assert (group["q"], group["a"], group["e"]) == ([["user", EVIL]], EVIL, EVIL)
    assert group["r"][0]["m"] == [["assistant", EVIL]] and group["r"][0]["x"] == EVIL
    assert data["model"] == EVIL


def test_the_page_fetches_nothing_and_never_makes_markup_of_text():
    page = compare.TEMPLATE.read_text(encoding="utf-8")
    assert page.count("$data") == 1 and "default-src 'none'" in page
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}  # a name
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|src=", page)
    assert len(page.splitlines()) <= 400


def test_the_page_is_installed_with_the_package():
    settings = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert "microscope.html" in settings["tool"]["setuptools"]["package-data"]["core"]


def test_a_group_is_a_task_of_an_agent_and_asks_once(shown):
    rows = [row("train", 1, seed, "x", agent=a) for seed in (1, 2) for a in ("white", "black")]
    rows += [row("train", 1, 1, "y", 1.0, agent="white", hit_token_limit=True)]
    late = row("train", 1, 2, "z", None, agent="black", asked="another opening")
    (segment,) = shown(trained(1), [*rows, late])["segments"]
    assert [(g["s"], g["a"], len(g["r"])) for g in segment["g"]] == [
        (1, "white", 2), (1, "black", 1), (2, "white", 1), (2, "black", 2),
    ]  # fmt: skip
    assert segment["g"][0]["q"] == [["user", "task 1"]]
    first, second = segment["g"][0]["r"]
    assert (first["p"], first["v"], "c" in first) == (0.0, False, False)
    assert (second["p"], second["v"], second["c"], "o" in second) == (1.0, True, True, False)
    assert segment["g"][3]["r"][1]["o"] == [["user", "another opening"]]
    assert segment["g"][3]["r"][1]["p"] is None  # was not finite


def test_what_the_policy_wrote_is_one_message_a_turn(shown):
    shots = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    game = row("train", 1, 1, "first move", rewards=[0.25, 0.5])
    game["messages"] = [
        *shots, *game["messages"], {"role": "user", "content": "a reply"},
        {"role": "assistant", "content": "second move"}, {"role": "user", "content": "the end"},
    ]  # fmt: skip
    (group,) = shown(trained(1), [game])["segments"][0]["g"]
    assert [text for _, text in group["q"]] == ["1+1?", "2", "task 1"]
    written = [text for _, text in group["r"][0]["m"]]
    assert written == ["first move", "a reply", "second move", "the end"]
    assert group["r"][0]["w"] == [0.25, 0.5]


def test_looks_are_packed_without_loss(shown):
    seen = trace_tokens(["a", " <b>"], [-0.5, -1.25], [-0.5001, -1.25], [-0.4, -1.2506], [1.5, 1.5])
    other = trace_tokens(["a", "b"], [-0.5, float("nan")], [-0.5, -1], [-0.5, -1], [1.5, -0.5])
    uneven = trace_tokens(["a"], [-0.5, -0.5], [-0.5], [-0.5], [1.5])
    rows = [
        row("train", 1, i, "x", token_traces=[x]) for i, x in enumerate((seen, other, uneven, {}))
    ]
    first, second, third, fourth = (g["r"][0] for g in shown(trained(1), rows)["segments"][0]["g"])
    assert first["l"] == [[["a", " <b>"], [-5000, -12500], [-1, 0], [1001, -6], 15000]]
    assert second["l"] == [[["a", "b"], [-5000, None], [0, None], [0, 0], [15000, -5000]]]
    assert third["l"] == fourth["l"] == [None]  # not looked at


def test_every_evaluation_is_there_to_choose_from(shown):
    rows = [row("eval", u, seed, f"at {u}") for u in (0, 5, 9) for seed in (1, 2)]
    data = shown([evaluated(0, 0.25), evaluated(5, 0.9), evaluated(9, 0.75)], rows)
    assert updates_of(data, "eval") == [0, 5, 9]
    assert data["results"] == [["adding", [0.25, 0.15, 0.35, 0], [0.75, 0.65, 0.85, 9], 0]]


def test_tokens_until_accuracy_are_those_of_training_so_far(shown):
    metrics = [evaluated(0, 0.2), *trained(1, 2), evaluated(3, 0.9) | trained(3)[0], *trained(4)]
    data = shown(metrics)
    assert (data["results"][0][3], data["tokens"], data["updates"]) == (300, 400, 4)


def test_a_large_run_stays_below_10_mb_and_says_what_it_left_out(shown):
    long = [row("train", 1, seed, "<" * 1_000_000 + "the end") for seed in range(4)]
    many = [row("train", u, s % 90, "'" * 8000) for u in (2, 3, 4) for s in range(700)]
    data = shown(trained(1, 2, 3, 4), [*long, *many])
    assert updates_of(data) == [1, 4]
    assert data["left"] == ["all rollouts of updates 2-3"]
    text = data["segments"][0]["g"][0]["r"][0]["m"][0][1]
    assert "[992007 characters left out: see rollouts.jsonl]" in text and text.endswith("the end")


def test_tokens_of_the_middle_go_first_then_updates_of_the_middle(shown, monkeypatch):
    rows = [
        row("train", u, 1, "x" * 2000, token_traces=[long_trace_tokens(400)]) for u in range(1, 10)
    ]
    template = compare.TEMPLATE.stat().st_size
    kept = {}
    for room in (100_000, 60_000, 30_000):
        monkeypatch.setattr(compare, "PAGE_BYTES", template + room)
        data = shown(trained(*range(1, 10)), rows)
        looked = [s["u"] for s in data["segments"] if "l" in s["g"][0]["r"][0]]
        kept[room] = (updates_of(data), looked, data["left"])
    assert kept[100_000] == ([*range(1, 10)], [*range(1, 10)], [])
    everything, looked, left = kept[60_000]
    assert everything == [*range(1, 10)]
    assert looked[0] == 1 and looked[-1] == 9 and 5 not in looked
    assert re.fullmatch(r"the tokens' numbers of updates \d-\d", left[0])
    some, looked, left = kept[30_000]
    assert looked == [1, 9] and set(looked) < set(some) < set(range(1, 10)) and 5 not in some
    assert re.fullmatch(r"all rollouts of updates \d-\d", left[0])


@pytest.mark.parametrize("room", [40_000, 9_000, 4_800])
def test_the_ends_shrink_before_they_go_and_the_limit_holds(shown, monkeypatch, tmp_path, room):
    rows = [
        row("train", u, s, "x" * 9000, token_traces=[long_trace_tokens(2000)])
        for u in (1, 2)
        for s in (1, 2)
    ]
    limit = compare.TEMPLATE.stat().st_size + room
    monkeypatch.setattr(compare, "PAGE_BYTES", limit)
    data = shown(trained(1, 2), rows)
    assert (tmp_path / "report.html").stat().st_size <= limit
    assert updates_of(data) == ([1, 2] if room > 6000 else [])
    assert not any("l" in r for s in data["segments"] for g in s["g"] for r in g["r"])
    assert data["left"]


def test_curves_are_thinned_and_keep_their_ends(shown):
    data = shown([{"update": u, "loss": u / 7, "odd": None, "name": "x"} for u in range(1, 5001)])
    at, values = data["curves"]["loss"]
    assert (at[0], at[-1], len(at) <= 601) == (1, 5000, True)
    assert values[-1] == 714.286 and list(data["curves"]) == ["loss"]


@pytest.mark.parametrize(
    "metrics", [[], [{"sft_step": 20, "sft/loss": 1.0}], [evaluated(0, 0.2)], trained(1, 2)]
)
def test_a_run_without_rollouts_is_a_page(shown, metrics):
    assert shown(metrics)["segments"] == []


def test_an_empty_folder_is_a_page(tmp_path):
    (data,) = data_of(write_report(tmp_path, CONFIG).read_text(encoding="utf-8"))
    assert (data["results"], data["segments"], data["curves"]) == ([], [], {})


def test_bytes_that_are_not_utf8_and_a_line_cut_short_are_no_trouble(shown, tmp_path):
    shown(trained(1), [row("train", 1, 1, "whole")])
    line = (tmp_path / "rollouts.jsonl").read_bytes().replace(b"whole", b"\xff\xfe")
    (tmp_path / "rollouts.jsonl").write_bytes(line + b'{"update": 1, "kind"')
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"update": 2, "\xff')
    (data,) = data_of(write_report(tmp_path, CONFIG).read_text(encoding="utf-8"))
    assert data["segments"][0]["g"][0]["r"][0]["m"] == [["assistant", "\ufffd\ufffd"]]


def test_the_journal_writes_looks_of_rollouts_that_have_them(tmp_path):
    write_config(tmp_path, CONFIG)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
    turn = Turn([1], [5], [-0.5], "stop", 1.0)
    looked = trace_tokens(["a"], [-0.5], [-0.5], [-0.25], [1.0])
    with Journal(tmp_path, CONFIG) as log:
        plain = Rollout("adding", "player", 1, 0, messages, [turn])
        log.log_rollouts("train", 1, [plain])
        log.log_rollouts("train", 2, [Rollout(**{**vars(plain), "token_traces": [looked]})])
    first, second = run_log.read_records(tmp_path / "rollouts.jsonl")
    assert "token_traces" not in first and second["token_traces"] == [looked]
    (data,) = data_of(write_report(tmp_path, CONFIG).read_text(encoding="utf-8"))
    assert data["segments"][1]["g"][0]["r"][0]["l"] == [[["a"], [-5000], [0], [2500], 10000]]


@pytest.fixture
def two(tmp_path):
    """Two runs: one that reached 0.9 at its second update, one that was never evaluated."""
    good = [evaluated(0, 0.2), trained(1)[0] | {"time/train_s": 90.0}]
    good += [trained(2)[0] | evaluated(2, 0.95)]
    rows = [row("train", u, 1, f"by a at {u}", token_traces=[long_trace_tokens(9)]) for u in (1, 2)]
    return [
        write_run(tmp_path / "a", good, rows),
        write_run(tmp_path / "b", trained(1), [row("train", 1, 1, "by b")], CONFIG | {"seed": 8}),
    ]


def test_a_comparison_has_all_runs_in_one_page(two, tmp_path):
    path = write_comparison(two, tmp_path / "compare.html")
    first, second = data_of(path.read_text(encoding="utf-8"))
    assert (first["name"], second["name"], second["seed"]) == ("a", "b", 8)
    assert updates_of(first) == [1, 2] and updates_of(second) == [1]


def test_runs_share_the_room_of_a_page(two, tmp_path, monkeypatch):
    limit = compare.TEMPLATE.stat().st_size + 13_000
    monkeypatch.setattr(compare, "PAGE_BYTES", limit)
    write_run(two[0], trained(1), [row("train", 1, s, "x" * 8000) for s in range(9)])
    path = write_comparison(two, tmp_path / "compare.html")
    assert path.stat().st_size <= limit
    first, second = data_of(path.read_text(encoding="utf-8"))
    assert first["left"] and updates_of(second) == [1] and not second["left"]


def test_compare_tells_each_run_and_environment(two):
    assert compare(two) == [
        ["a", "grpo", "adding", "0.20 [0.10, 0.30] -> 0.95 [0.85, 1.05]", "200", "200", "1.5"],
        ["b", "grpo", "adding", "not evaluated", "100", "not reached", "0.0"],
    ]


def test_the_command_prints_a_table_and_writes_the_page(two, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    assert run_log.main([str(run) for run in two]) == 0
    out = capsys.readouterr().out
    assert "0.20 [0.10, 0.30] -> 0.95 [0.85, 1.05]" in out and "not evaluated" in out
    assert out.splitlines()[-1] == f"side by side: {tmp_path / 'compare.html'}"
    assert len(data_of((tmp_path / "compare.html").read_text(encoding="utf-8"))) == 2


def test_what_is_not_a_run_is_one_line_and_code_2(two, tmp_path, capsys):
    (tmp_path / "no").mkdir()
    broken = write_run(tmp_path / "broken")
    for config in ("a: [", "just text", "algo: grpo"):
        (broken / "config.yaml").write_text(config)
        with pytest.raises(UsageError, match=r"broken/config\.yaml"):
            compare([broken])
    unmeasured = write_run(tmp_path / "unmeasured")
    (unmeasured / "metrics.jsonl").unlink()
    for args, told in (
        ([str(two[0]), str(tmp_path / "no")], "no: not a run folder (it has no config.yaml)"),
        ([str(unmeasured)], "not a run folder (it has no metrics.jsonl)"),
        ([str(tmp_path / "gone")], "gone: not a run folder"),
        ([], "which runs?"),
        (["--help"], "which runs?"),
    ):
        assert run_log.main(args) == 2
        out, err = capsys.readouterr()
        assert out == "" and told in err and err.count("\n") == 1
    assert not (tmp_path / "compare.html").exists()
