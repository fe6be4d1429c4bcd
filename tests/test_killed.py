"""A run that is killed anywhere and resumed has the metrics of an uninterrupted run.

Processes are forked from one that has imported everything, so that each takes about a second. They
are killed in three ways: by SIGKILL at the nth change to a file of the run; by SIGXFSZ in the
middle of a write, at a random byte; by SIGKILL at a random time.

    pytest -m slow tests/test_killed.py                  # 3 deaths in each of 2 settings
    pytest -m seeds tests/test_killed.py                 # 48 deaths in each of 6
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import random
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from conftest import save_small

sys.path.append(str(Path(__file__).parent.parent / "runs/faults"))
from kills import end_in_a_write, watch_changes

SMALL = """--run-name a --sft-steps 2 --sft-batch-size 2 --num-updates 3 --num-prompts 2
    --group-size 2 --eval-num-tasks 2 --eval-every 2 --save-every 1 --max-tokens 10
    --max-model-len 256 --device cpu""".split()
SETTINGS = {
    "full": "--algo grpo --sft-best 2",
    "lora": "--algo reinforce --lora-rank 2 --kl-coef 0.1",
    "ppo": "--algo ppo --num-epochs 2 --num-minibatches 2",
    "reference": "--algo grpo --kl-coef 0.1 --filter-groups 1",
    "two ranks": "--algo grpo",
    "two ranks, ppo and lora": "--algo ppo --lora-rank 2",
}
TIMEOUT = 120  # seconds for one process
GRACE = 3  # seconds for the other ranks to end after one was killed


def train_in_child(args, folder, environment, death, changes):
    """Runs the command in a child process, and ends it as `death` says. Fills `changes`."""
    os.chdir(folder)
    os.environ.update(environment)
    if "RANK" in environment and environment["RANK"] != "0":
        death = {}
    sys.stdout = sys.stderr = open("output.txt", "a")  # noqa: SIM115
    count = 0

    def note(change):
        nonlocal count
        count += 1
        changes.append(change)
        if count == death.get("change"):
            if "bytes" not in death:
                os.kill(os.getpid(), signal.SIGKILL)
            end_in_a_write(death["bytes"])

    import train

    watch_changes(note)
    sys.exit(train.run_command(args))


@pytest.fixture(scope="module")
def run_processes():
    """A function (args, folder, ranks, death) -> exit codes, changes of rank 0 to files."""
    context = multiprocessing.get_context("forkserver")
    os.environ["OMP_NUM_THREADS"] = "1"
    context.set_forkserver_preload(["train", "core.report.page", "core.report.curves", "peft"])
    manager = context.Manager()

    def run(args, folder, ranks=1, death=None):
        changes = manager.list()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(ranks):
            environment = {} if ranks == 1 else {
                "TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            }  # fmt: skip
            child_args = (args, str(folder), environment, death or {}, changes if rank == 0 else [])
            children.append(context.Process(target=train_in_child, args=child_args))
            children[-1].start()
        victim = children[random.Random(str(death)).randrange(ranks)]
        if death and "time" in death:
            victim.join(death["time"])
            if victim.is_alive():
                victim.kill()
        ended = [child.sentinel for child in children]
        assert multiprocessing.connection.wait(ended, TIMEOUT), "it hangs"
        for child in children:  # after a death the others end, or are killed as torchrun would
            child.join(GRACE if any(c.exitcode for c in children) else TIMEOUT)
            if any(c.exitcode for c in children):
                child.kill()
                child.join()
            assert not child.is_alive(), "it hangs"
        return [child.exitcode for child in children], list(changes)

    yield run
    manager.shutdown()


def metrics_of(folder):
    lines = (folder / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines
    ]


def kind(change):
    """A change without numbers and process ids: 'open #/config.yaml'."""
    event, _, path = change.partition(" ")
    parts = Path(path).parts
    parts = parts[parts.index("runs") + 1 :]
    return f"{event} {'/'.join('#' if any(c.isdigit() for c in p) else p for p in parts)}"


def draw_deaths(rng, changes, number, seconds):
    """Ways to die: first at every kind of change once, then at random changes, bytes and times."""
    first = {}
    for i, change in enumerate(changes):
        first.setdefault(kind(change), i + 1)
    deaths = [{"change": n} for n in first.values()]
    rng.shuffle(deaths)
    for _ in range(number):
        deaths.append({"change": rng.randrange(1, len(changes) + 1)})
        size = int(10 ** rng.uniform(0, 5.3))
        deaths.append({"change": rng.randrange(1, len(changes) + 1), "bytes": size})
        deaths.append({"time": rng.uniform(0.05, 1.2 * seconds)})
    rng.shuffle(deaths)
    return deaths[:number]


def check_resumed_after_deaths(run_processes, tmp_path, setting, number, seed):
    """Kills runs `number` times in all, up to 5 times each. Returns the kinds of places of death.

    Each run must end with the metrics of a run that was not killed.
    """
    ranks = 2 if setting.startswith("two ranks") else 1
    model = save_small("qwen3", tmp_path / "model")
    flags = [*SMALL, "--model-id", str(model), *SETTINGS[setting].split()]
    whole = tmp_path / "whole"
    whole.mkdir()
    started = time.monotonic()
    codes, changes = run_processes(flags, whole, ranks)
    seconds = time.monotonic() - started
    assert codes == [0] * ranks, (whole / "output.txt").read_text()[-2000:]
    expected = metrics_of(whole)
    deaths = iter(draw_deaths(random.Random(seed), changes, 4 * number, seconds))
    places = []
    run = 0
    while len(places) < number:
        run += 1
        folder = tmp_path / f"run{run}"
        folder.mkdir()
        (folder / "output.txt").touch()
        for death in [*(next(deaths) for _ in range(min(5, number))), {}]:
            args = ["--resume", "runs/a"] if (folder / "runs" / "a").exists() else flags
            codes, changes = run_processes(args, folder, ranks, death)
            output = (folder / "output.txt").read_text()[-2000:]
            if all(code == 0 for code in codes):  # the run finished before the death
                continue
            killed = -signal.SIGKILL in codes or -signal.SIGXFSZ in codes
            assert death and killed, (codes, output)
            places.append(kind(changes[-1]) if changes else "")
        assert metrics_of(folder) == expected, (run, output)
        assert not list((folder / "runs").glob("**/checkpoint/.part*"))
        shutil.rmtree(folder)
    return places


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["ppo", "two ranks"])
def test_a_killed_run_resumes_to_the_same_metrics(run_processes, tmp_path, setting):
    check_resumed_after_deaths(run_processes, tmp_path, setting, number=3, seed=1)


@pytest.mark.seeds
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_killed_48_times_resumes_to_the_same_metrics(run_processes, tmp_path, setting):
    places = check_resumed_after_deaths(run_processes, tmp_path, setting, number=48, seed=0)
    print(f"{setting}: {len(places)} deaths at {len(set(places))} kinds of places")
    assert len(set(places)) >= 8
