"""runs/on_flyte.py: the runs of a sweep, failed runs, and the table, here and on Flyte."""

import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from core import cli
from core.metrics import describe
from core.run_log import read_records

SPECIFICATION = """
import json
import on_flyte
from flyte._internal.runtime.task_serde import translate_task_to_wire
from flyte.models import SerializationContext
from google.protobuf.json_format import MessageToDict
context = SerializationContext(version="1", root_dir=on_flyte.ROOT)
for task in (on_flyte.train_on_nodes, on_flyte.train, on_flyte.sweep):
    template = MessageToDict(translate_task_to_wire(task, context))["taskTemplate"]
    print(json.dumps([template, str(task.image._layers)]))
"""
NODE = """
import asyncio, sys
import on_flyte
from flyte._context import internal_ctx
from flyte.models import ActionID, RawDataPath, TaskContext
from flyte.report import Report
context = TaskContext(
    action=ActionID(name="a0", run_name="run"), version="1", output_path="out",
    raw_data_path=RawDataPath(path="raw"), run_base_dir=".", report=Report("a0"), mode="remote",
)
folder, *flags = sys.argv[1:]
with internal_ctx().replace_task_context(context):
    asyncio.run(on_flyte.train_on_nodes.execute(flags=flags, folder=folder))
"""
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


def test_runs_are_named_after_a_free_folder_or_the_run_name(folder):
    (folder / "runs/sweep-1").mkdir(parents=True)
    assert on_flyte.plan(["seed=4"], ["--seed", "3"])[1][0][-1] == "sweep-2-1"
    assert on_flyte.plan(["seed=4"], ["--run-name", "yours"])[1][0][-1] == "yours-1"
    assert on_flyte.plan(None, ["--run-name", "yours"])[1] == [["--run-name", "yours"] * 2]


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
        ("--sweep seed=0,,1", "write flag=value,value"),
        ("--sweep seed=0,0", "each value once"),
        ("--sweep seed=0 seed=1", "each flag once"),
        ("--sweep seed=0,1 -- --resume runs/there", "runs/there"),
        ("--sweep seed=0,two", "--seed"),
        ("--sweep algo=grpo,dqn", "--algo"),
        ("--learning-rate 1", "--learning-rate"),
        ("--config none.yaml", "none.yaml"),
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


def test_without_flyte_the_error_names_the_extra(folder, capsys, monkeypatch):
    monkeypatch.setattr(on_flyte, "flyte", None)
    assert on_flyte.main(["--num-updates", "1"]) == 2
    assert 'pip install -e ".[flyte]"' in capsys.readouterr().err


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


def test_interrupt_keeps_the_finished_runs(stub, monkeypatch):
    train_once = on_flyte.train_once

    def interrupted(flags):
        if "5" in flags:
            raise KeyboardInterrupt
        return train_once(flags)

    monkeypatch.setattr(on_flyte, "train_once", interrupted)
    assert on_flyte.main(["--local", "--sweep", "seed=0,5,6"]) == 1
    rows = {row[0]: row[2] for row in table_of("sweep-1")}
    assert rows == {
        "seed=0": "0.50 [0.25, 0.75]", "seed=5": "failed: stopped", "seed=6": "failed: stopped",
    }  # fmt: skip


def test_flyte_without_a_cluster_is_an_error(folder, capsys, monkeypatch):
    pytest.importorskip("flyte", reason=MISSING)
    monkeypatch.setenv("HOME", str(folder))
    assert on_flyte.main(["--num-updates", "1"]) == 2
    assert "no Flyte cluster is configured" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", [pytest.param("--local", marks=pytest.mark.seeds), "--flyte-local"]
)
def test_a_sweep_trains_and_evaluates_each_run(folder, where):
    if where == "--flyte-local":
        pytest.importorskip("flyte", reason=MISSING)
    assert on_flyte.main([where, "--sweep", "group-size=1,2", "--", *TINY]) == 1
    rows = table_of("sweep-1")
    assert [row[0] for row in rows] == ["group-size=1", "group-size=2"]
    assert rows[0][2].startswith("failed: train.py: --group-size 1")
    for _, env, before, after, minutes, run in rows[1:]:
        records = read_records(Path(run) / "metrics.jsonl")
        assert env == "letter_counting" and float(minutes) >= 0
        assert (before, after) == (describe(env, records[-2]), describe(env, records[-1]))
        assert (Path(run) / "report.html").exists()


@pytest.mark.slow
def test_flyte_tasks_request_the_resources_in_the_file():
    pytest.importorskip("flyte", reason=MISSING)
    show = "import on_flyte as o; print(o.train.resources, o.train.env_vars, o.train.image._layers)"
    tasks = {}
    for machine in ("cpu", "gpu"):  # chosen when the file is imported, here and in a container
        env = os.environ | {"PICORL_ON": machine}
        command = [sys.executable, "-c", show]
        tasks[machine] = subprocess.check_output(command, env=env, cwd=ROOT / "runs", text=True)
    assert "gpu='L40s:1'" in tasks["gpu"] and "gpu=None" in tasks["cpu"]
    assert "'vllm>=" in tasks["gpu"] and "'vllm>=" not in tasks["cpu"]
    assert all("'transformers>=" in text for text in tasks.values())
    assert all(f"'PICORL_ON': '{name}'" in text for name, text in tasks.items())


def on_two_nodes(machine):
    """The environment variables of a container of a run on two nodes."""
    paths = f"{ROOT}:{ROOT / 'runs'}"
    asked = {"PICORL_ON": machine, "PICORL_NODES": "2", "PICORL_POD_TEMPLATE": "shared"}
    return os.environ | asked | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_specification_of_a_run_on_two_nodes_has_an_elastic_job():
    pytest.importorskip("flyteplugins.pytorch", reason=MISSING)
    command = [sys.executable, "-c", SPECIFICATION]
    text = subprocess.check_output(command, env=on_two_nodes("gpu"), text=True)
    specifications = [json.loads(line) for line in text.splitlines()]
    (nodes, layers), (train, _), (sweep, _) = specifications
    assert nodes["type"] == "pytorch" and train["type"] == sweep["type"] == "python"
    assert nodes["custom"] == {
        "elasticConfig": {"rdzvBackend": "c10d", "maxRestarts": 3, "nprocPerNode": 1,
                          "minReplicas": 2, "maxReplicas": 2},
        "workerReplicas": {"replicas": 2},
    }  # fmt: skip
    assert nodes["interface"]["outputs"] == {}  # every node would write them
    requests = {r["name"]: r["value"] for r in nodes["container"]["resources"]["requests"]}
    assert requests == {"CPU": "8", "MEMORY": "48Gi", "GPU": "1"}
    assert "GPU" not in str(train["container"]["resources"])  # it waits for the nodes
    assert all(name in layers for name in ("'torch>=", "'vllm>=", "'flyteplugins-pytorch>="))
    for template, _ in specifications:
        assert template["metadata"]["podTemplateName"] == "shared"
        variables = {pair["key"]: pair["value"] for pair in template["container"]["env"]}
        assert variables["PICORL_NODES"] == "2" and variables["PICORL_ON"] == "gpu"


@pytest.mark.seeds
def test_two_nodes_train_one_run(folder):
    """As the containers of the job do, with the endpoint that its operator sets."""
    pytest.importorskip("flyteplugins.pytorch", reason=MISSING)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = on_two_nodes("cpu") | {"PET_RDZV_ENDPOINT": f"localhost:{port}"}
    command = [sys.executable, "-c", NODE, str(folder), *TINY, "--run-name", "run"]
    both = [
        subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE,
                         stdout=subprocess.PIPE) for _ in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum(out.count("update    1") for out, _ in said) == 1
    assert any("x 2" in out for out, _ in said)  # ranks, in the title
    assert on_flyte.rows_of(["run"], 60.0)[0][0] == "letter_counting"


@pytest.mark.seeds
def test_flyte_local_mode_trains_in_one_process(folder):
    pytest.importorskip("flyteplugins.pytorch", reason=MISSING)
    command = [sys.executable, str(ROOT / "runs/on_flyte.py"), "--flyte-local", "--nodes", "2"]
    command += ["--pod-template", "shared", "--sweep", "seed=0", "--", *TINY]
    done = subprocess.run(command, env=on_two_nodes("cpu"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row[:2] for row in table_of("sweep-1")] == [["seed=0", "letter_counting"]]


@pytest.mark.parametrize(
    ("nodes", "template", "args", "message"),
    [
        (0, "shared", [], "--nodes 0: use 1 or more"),
        (2, "shared", ["--local"], "not with --local"),
        (2, "", [], "--nodes needs --pod-template"),
    ],
)
def test_invalid_nodes_exit_with_code_2(
    folder, capsys, monkeypatch, nodes, template, args, message
):
    monkeypatch.setattr(on_flyte, "PROCESSES", nodes)
    monkeypatch.setattr(on_flyte, "ASKED", Namespace(nodes=nodes, pod_template=template))
    assert on_flyte.main(args) == 2
    assert message in capsys.readouterr().err
