"""Sweeps: which runs they are, what a failed one costs, and the table, here and on Flyte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import train
from core.metrics import describe

MISSING = 'Flyte is not installed: pip install -e ".[flyte]"'
ROOT = Path(train.__file__).parent
sys.path.append(str(ROOT / "runs"))
import on_flyte  # noqa: E402

TINY = """--num-updates 1 --sft-steps 2 --sft-batch-size 4 --num-prompts 2 --eval-num-tasks 4
    --max-tokens 8 --microscope 0 --device cpu""".split()
STUB = """
import json, os, pathlib, signal, sys
seed, name = sys.argv[sys.argv.index("--seed") + 1], sys.argv[-1]
print("a warning of some library", file=sys.stderr)
if seed == "1":
    raise MemoryError("no room for 7 GB")
if seed == "2":
    os.kill(os.getpid(), signal.SIGKILL)
if seed == "3":
    sys.exit(1)
if seed == "4":
    sys.exit("train.py: that can't be meant\\nand more")
run = pathlib.Path("runs", name)
run.mkdir(parents=True)
evals = {f"eval/{e}/{k}": v for e in ("reverse", "a|b") for k, v in
         {"accuracy": 0.5, "ci_low": 0.25, "ci_high": 0.75}.items()}
(run / "metrics.jsonl").write_text(json.dumps({"update": 0, **evals}) + "\\n")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stub(folder, monkeypatch):
    """A train.py that takes no time, and fails in the way that its seed says."""
    (folder / "train.py").write_text(STUB)
    monkeypatch.setattr(on_flyte, "ROOT", folder)


def table_of(name):
    lines = Path("runs", name, "table.md").read_text().splitlines()[2:]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def test_a_sweep_is_the_cross_product_each_run_with_its_name(folder):
    labels, runs = on_flyte.plan(["seed=0,1", "grpo.clip-high=0.2,0.3"], ["--lr", "1e-3"])
    assert labels == [
        "seed=0 grpo.clip-high=0.2", "seed=0 grpo.clip-high=0.3",
        "seed=1 grpo.clip-high=0.2", "seed=1 grpo.clip-high=0.3",
    ]  # fmt: skip
    assert [run[-1] for run in runs] == ["sweep-1-1", "sweep-1-2", "sweep-1-3", "sweep-1-4"]
    config = on_flyte.parsed(runs[1])
    assert (config.seed, config.grpo.clip_high, config.lr) == (0, 0.3, 1e-3)
    (folder / "runs/sweep-1").mkdir(parents=True)
    assert on_flyte.plan(["seed=4"], ["--seed", "3"])[1][0][-1] == "sweep-2-1"
    assert on_flyte.plan(["seed=4"], ["--run-name", "yours"])[1][0][-1] == "yours-1"
    assert on_flyte.plan(None, ["--run-name", "yours"])[1] == [["--run-name", "yours"] * 2]


def test_values_may_hold_commas_spaces_and_switches(folder):
    sweep = [
        "env=reverse math_qa:level=1;gymnasium:id=CartPole-v1,repeat=3",
        "mask_truncated_completions=true",
    ]
    configs = [on_flyte.parsed(run) for run in on_flyte.plan(sweep, [])[1]]
    assert [c.env for c in configs] == [
        ("reverse", "math_qa:level=1"), ("gymnasium:id=CartPole-v1,repeat=3",),
    ]  # fmt: skip
    assert all(c.mask_truncated_completions for c in configs)
    assert (
        on_flyte.plan(["mask_truncated_completions=false"], [])[1][0][0]
        == "--no-mask_truncated_completions"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--sweep", "at least one"),
        ("--sweep seed", "write flag=value,value"),
        ("--sweep seed=", "write flag=value,value"),
        ("--sweep seed=0,,1", "write flag=value,value"),
        ("--sweep seed=0,0", "each value once"),
        ("--sweep seed=0 seed=1", "names each flag once"),
        ("--sweep seed=0,1 -- --resume runs/there", "runs/there"),
        ("--sweep seed=0,two", "--seed"),
        ("--sweep algo=grpo,dqn", "--algo"),
        ("--sweep speed=1,2", "--speed"),
        ("--learning-rate 1", "--learning-rate"),
        ("--config none.yaml", "none.yaml"),
        ("--run-name there", "--run-name"),
    ],
)
def test_bad_input_is_one_line_and_code_2(folder, capsys, args, message):
    (folder / "runs/there").mkdir(parents=True)
    assert on_flyte.main(["--local", *args.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert len(err.strip().splitlines()) == 1
    assert [p.name for p in (folder / "runs").iterdir()] == ["there"]


def test_without_flyte_it_says_what_to_install(folder, capsys, monkeypatch):
    monkeypatch.setattr(on_flyte, "flyte", None)
    assert on_flyte.main(["--num-updates", "1"]) == 2
    assert 'pip install -e ".[flyte]"' in capsys.readouterr().err


def test_a_failed_run_costs_its_own_row(stub, capsys):
    assert on_flyte.main(["--local", "--sweep", "seed=1,2,3,4,0"]) == 1
    before = "0.50 [0.25, 0.75]"
    assert [[*row[:4], row[5]] for row in table_of("sweep-1")] == [
        ["seed=1", "", "failed: MemoryError: no room for 7 GB", "", ""],
        ["seed=2", "", "failed: exit code -9", "", ""],
        ["seed=3", "", "failed: exit code 1", "", ""],
        ["seed=4", "", "failed: train.py: that can't be meant", "", ""],
        ["seed=0", "reverse", before, before, "runs/sweep-1-5"],
        ["seed=0", "a¦b", before, before, "runs/sweep-1-5"],
    ]
    out = capsys.readouterr().out
    assert "before RL [95%]" in out and before in out and "runs/sweep-1/table.md" in out
    assert on_flyte.main(["--local", "--sweep", "seed=0,5"]) == 0
    assert len(table_of("sweep-2")) == 4


def test_an_interrupt_leaves_the_table_of_what_was_done(stub, monkeypatch):
    really = on_flyte.train_once

    def interrupted(flags):
        if "5" in flags:
            raise KeyboardInterrupt
        return really(flags)

    monkeypatch.setattr(on_flyte, "train_once", interrupted)
    assert on_flyte.main(["--local", "--sweep", "seed=0,5,6"]) == 1
    rows = {row[0]: row[2] for row in table_of("sweep-1")}
    assert rows == {
        "seed=0": "0.50 [0.25, 0.75]", "seed=5": "failed: stopped", "seed=6": "failed: stopped",
    }  # fmt: skip


def test_flyte_without_a_cluster_is_one_line(folder, capsys, monkeypatch):
    pytest.importorskip("flyte", reason=MISSING)
    monkeypatch.setenv("HOME", str(folder))
    assert on_flyte.main(["--num-updates", "1"]) == 2
    assert capsys.readouterr().err == (
        "on_flyte.py: no Flyte cluster is configured: flyte create config; or --local\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("where", ["--local", "--flyte-local"])
def test_a_real_sweep_has_a_row_for_each_run(folder, where):
    if where == "--flyte-local":
        pytest.importorskip("flyte", reason=MISSING)
    sweep = ["--sweep", "group-size=1,2,3", "--", *TINY]
    assert on_flyte.main([where, *sweep]) == 1
    rows = table_of("sweep-1")
    assert [row[0] for row in rows] == ["group-size=1", "group-size=2", "group-size=3"]
    assert rows[0][2].startswith("failed: train.py: --group-size 1 has nothing to compare")
    for row in rows[1:]:
        assert float(row[4]) >= 0
        records = (Path(row[5]) / "metrics.jsonl").read_text().splitlines()
        env, before, after = row[1:4]
        assert env == "letter_counting"
        assert before == describe(env, json.loads(records[-2]))
        assert after == describe(env, json.loads(records[-1]))
        assert (Path(row[5]) / "report.html").exists()


@pytest.mark.slow
@pytest.mark.seeds
def test_a_single_run_is_the_same_on_flyte_and_its_task_returns_what_it_left(folder):
    flyte = pytest.importorskip("flyte", reason=MISSING)
    assert on_flyte.main(["--local", "--run-name", "here", *TINY]) == 0
    run = flyte.with_runcontext(mode="local").run(on_flyte.train, [*TINY, "--run-name", "there"])
    (row,), metrics, kept = json.loads(run.outputs()[0]), run.outputs()[1], run.outputs()[2]
    assert Path("runs/there/metrics.jsonl").read_text() == metrics
    assert row[4] == kept.path and (Path(kept.path) / "report.html").exists()
    there = [json.loads(line)["sft/loss"] for line in metrics.splitlines() if "sft/" in line]
    here = Path("runs/here/metrics.jsonl").read_text().splitlines()
    assert there == [json.loads(line)["sft/loss"] for line in here if "sft/" in line]


@pytest.mark.slow
def test_flyte_tasks_ask_for_what_the_file_states():
    pytest.importorskip("flyte", reason=MISSING)
    show = "import on_flyte as o; print(o.train.resources, o.train.env_vars, o.train.image._layers)"
    asked = {}
    for machine in ("cpu", "gpu"):  # chosen while the file is read, here and in a container
        env = os.environ | {"PICORL_ON": machine}
        command = [sys.executable, "-c", show]
        asked[machine] = subprocess.check_output(command, env=env, cwd=ROOT / "runs", text=True)
    assert "gpu='L40s:1'" in asked["gpu"] and "gpu=None" in asked["cpu"]
    assert "'vllm>=" in asked["gpu"] and "'vllm>=" not in asked["cpu"]
    assert all("'transformers>=" in text for text in asked.values())
    assert all(f"'PICORL_ON': '{name}'" in text for name, text in asked.items())
