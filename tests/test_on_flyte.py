"""runs/on_flyte.py: the runs of a sweep, failed runs, and the table, here and on Flyte."""

import sys
from pathlib import Path

import pytest

from core import cli
from core.metrics import describe
from core.run_log import read_records

MISSING = 'Flyte is not installed: pip install -e ".[flyte]"'
ROOT = Path(__file__).parent.parent
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
    sys.exit("train.py: invalid setting\\nand more")
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
    """A train.py that takes no time and fails depending on its seed."""
    (folder / "train.py").write_text(STUB)
    monkeypatch.setattr(on_flyte, "ROOT", folder)


def table_of(name):
    lines = Path("runs", name, "table.md").read_text().splitlines()[2:]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def test_sweep_runs_all_combinations(folder):
    labels, runs = on_flyte.plan(["seed=0,1", "grpo.clip-high=0.2,0.3"], ["--lr", "1e-3"])
    assert labels == [
        "seed=0 grpo.clip-high=0.2", "seed=0 grpo.clip-high=0.3",
        "seed=1 grpo.clip-high=0.2", "seed=1 grpo.clip-high=0.3",
    ]  # fmt: skip
    assert [run[-1] for run in runs] == ["sweep-1-1", "sweep-1-2", "sweep-1-3", "sweep-1-4"]
    cfg = cli.parse(runs[1])
    assert (cfg.seed, cfg.grpo.clip_high, cfg.lr) == (0, 0.3, 1e-3)


def test_sweep_values_may_contain_commas_spaces_and_switches(folder):
    switch = "mask-truncated-completions"
    sweep = ["env=reverse math_qa:level=1;gymnasium:id=CartPole-v1,repeat=3", f"{switch}=true"]
    configs = [cli.parse(run) for run in on_flyte.plan(sweep, [])[1]]
    assert [c.env for c in configs] == [
        ("reverse", "math_qa:level=1"), ("gymnasium:id=CartPole-v1,repeat=3",),
    ]  # fmt: skip
    assert all(c.mask_truncated_completions for c in configs)
    assert on_flyte.plan([f"{switch}=false"], [])[1][0][0] == f"--no-{switch}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--sweep", "--sweep needs at least one flag"),
        ("--sweep seed", "write flag=value,value"),
        ("--sweep seed=0,0", "each value once"),
        ("--sweep seed=0,1 -- --resume runs/there", "runs/there"),
        ("--sweep seed=0,two", "--seed"),
        ("--run-name there", "--run-name"),
    ],
)
def test_invalid_input_exits_with_code_2_and_makes_no_run(folder, capsys, args, message):
    (folder / "runs/there").mkdir(parents=True)
    with pytest.raises(SystemExit) as exit:
        sys.exit(on_flyte.main(["--local", *args.split()]))
    assert exit.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert [p.name for p in (folder / "runs").iterdir()] == ["there"]


def test_a_failed_run_is_a_row_of_the_table(stub, capsys):
    assert on_flyte.main(["--local", "--sweep", "seed=1,2,3,4,0"]) == 1
    before = "0.50 [0.25, 0.75]"
    assert [[*row[:4], row[5]] for row in table_of("sweep-1")] == [
        ["seed=1", "", "failed: MemoryError: no room for 7 GB", "", ""],
        ["seed=2", "", "failed: exit code -9", "", ""],
        ["seed=3", "", "failed: exit code 1", "", ""],
        ["seed=4", "", "failed: train.py: invalid setting", "", ""],
        ["seed=0", "reverse", before, before, "runs/sweep-1-5"],
        ["seed=0", "a¦b", before, before, "runs/sweep-1-5"],
    ]
    out = capsys.readouterr().out
    assert "before RL [95%]" in out and before in out and "runs/sweep-1/table.md" in out
    assert on_flyte.main(["--local", "--sweep", "seed=0,5"]) == 0
    assert len(table_of("sweep-2")) == 4


@pytest.mark.slow
def test_a_sweep_trains_and_evaluates_each_run_in_flytes_local_mode(folder):
    pytest.importorskip("flyte", reason=MISSING)
    assert on_flyte.main(["--flyte-local", "--sweep", "group-size=1,2", "--", *TINY]) == 1
    rows = table_of("sweep-1")
    assert [row[0] for row in rows] == ["group-size=1", "group-size=2"]
    assert rows[0][2].startswith("failed: train.py: --group-size 1")
    for _, env, before, after, minutes, run in rows[1:]:
        records = read_records(Path(run) / "metrics.jsonl")
        assert env == "letter_counting" and float(minutes) >= 0
        assert (before, after) == (describe(env, records[-2]), describe(env, records[-1]))
        assert (Path(run) / "report.html").exists()
