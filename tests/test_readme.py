"""What the README says is what the code does: line counts, settings, metrics, example."""

import json
import re
import statistics
from pathlib import Path

import pytest

from core import cli, config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_line_counts_are_those_of_the_files():
    rows = re.findall(r"^\| \[`?([\w/]+\.py)`?\]\([^)]*\) \| (\d+) \|", README, re.MULTILINE)
    assert len(rows) >= 8
    assert {f: int(n) for f, n in rows} == {
        f: len((ROOT / f).read_text().splitlines()) for f, _ in rows
    }


def test_results_are_those_of_the_recorded_runs():
    rows = re.findall(r"^\| seed (\d), `(\w+)` \| (.+?) \| (.+?) \| (\d+) s \|$", README, re.M)
    assert len(rows) >= 3
    from core.metrics import before_after, describe
    from core.run_log import read_records

    folder = ROOT / "runs/letter_counting_tiny"
    seconds = json.loads((folder / "seconds.json").read_text())
    for seed, algo, before, after, took in rows:
        ((env, first, last),) = before_after(read_records(folder / f"{algo}-seed{seed}.jsonl"))
        assert (before, after) == (describe(env, first), describe(env, last))
        assert int(took) == seconds[f"{algo}-seed{seed}"]


def test_the_recorded_runs_meet_the_claim():
    folder = ROOT / "runs/letter_counting_tiny"
    table = (folder / "README.md").read_text()
    seconds = json.loads((folder / "seconds.json").read_text())
    assert len(seconds) == 9
    for name in seconds:
        algo, seed = name.split("-seed")
        assert re.search(rf"^\| {algo} \| {seed} \|", table, re.M)


@pytest.mark.parametrize("page, least", [("README.md", 6), ("core/workshop/README.md", 4)])
def test_every_command_is_valid(page, least):
    text = (ROOT / page).read_text()
    commands = re.findall(r"^ +python train\.py(.*?)(?:#.*)?$", text, re.MULTILINE)
    assert len(commands) >= least
    for flags in commands:
        if "<name>" not in flags:
            cfg = config.resolve(cli.parse(flags.split()))
            config.validate(cfg)


PAGES = "README.md runs/README.md core/workshop/README.md CONTRIBUTING.md".split()


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_script_that_is_named_is_there(page):
    text, here = (ROOT / page).read_text(), (ROOT / page).parent
    links = [link for link in re.findall(r"\]\(([^)#]*)[^)]*\)", text) if "://" not in link]
    assert all((here / link).exists() for link in links), links
    for script in re.findall(r"^ +python ([\w/.]+\.py)", text, re.MULTILINE):
        assert (ROOT / script.replace("<name>", "letter_counting_tiny")).exists(), script
    for module in re.findall(r"python -m ((?:core|environments)[\w.]*)", text):
        assert (ROOT / module.replace(".", "/")).is_dir() or (
            ROOT / f"{module.replace('.', '/')}.py"
        ).exists(), module


@pytest.mark.parametrize("algo", ["reinforce", "grpo", "ppo"])
def test_every_metric_is_in_the_table(command, algo):
    table = set(re.findall(r"`([a-z]+(?:/[<>\w]+)*)`", README.split("## What the metrics")[1]))
    flags = """--sft-steps 20 --sft-batch-size 2 --num-updates 1 --num-prompts 2 --group-size 2
        --eval-num-tasks 2 --max-tokens 9 --run-name a --algo"""
    assert command(*flags.split(), algo)[0] == 0
    logged = {
        key
        for line in Path("runs/a/metrics.jsonl").read_text().splitlines()
        for key in json.loads(line)
    } - {"update", "sft_step"}
    known = {re.sub(r"eval/[^/]+/", "eval/<env>/", k) for k in logged}
    known = {"info/<key>" if k.startswith("info/") else k for k in known}
    assert known <= table, known - table


def test_the_example_environment_runs(command):
    import random

    from core.types import Message
    from environments import registry
    from environments.base import Env, Step
    from environments.registry import register

    (code,) = re.findall(r"```python\n(@register.*?)```", README, re.DOTALL)
    known = dict(registry.ENVIRONMENTS)
    try:
        exec(code, {"random": random, "Message": Message, "Env": Env, "Step": Step,
                    "register": register})  # fmt: skip
        flags = """--env parity --sft-steps 0 --num-updates 1 --num-prompts 2 --group-size 2
            --eval-num-tasks 2 --max-tokens 4 --run-name a"""
        assert command(*flags.split())[0] == 0
    finally:
        registry.ENVIRONMENTS.clear()
        registry.ENVIRONMENTS.update(known)


def test_speed_is_what_was_measured():
    def sides(name):
        cases = json.loads((ROOT / f"runs/benchmarks/speed/{name}-cpu.json").read_text())["cases"]
        for case in cases:
            ours, theirs = case["sides"].values()
            yield case, ours, theirs

    def share(ours, theirs, key):
        return statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))

    steps = [f"{share(a, b, 'step_s'):.2f}" for _, a, b in sides("vs_trl")]
    rates = [f"{share(a, b, 'tokens_per_s'):.2f}" for _, a, b in sides("vs_generate")]
    ((_, one, two),) = sides("scaling_ranks")
    assert [case["prompt_tokens"] for case, _, _ in sides("vs_trl")] == [50, 200]
    assert f"| a whole step, share of TRL's time | {' | '.join(steps)} |" in README
    assert f"| tokens a second, times those of `generate` | {' | '.join(rates)} |" in README
    assert f"take {share(two, one, 'update_s'):.2f} of the time of one" in README.replace("\n", " ")
    assert all(
        len(a) == len(b) >= 5 for name in ("vs_trl", "vs_generate") for _, a, b in sides(name)
    )
