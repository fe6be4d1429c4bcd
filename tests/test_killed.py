"""Killed anywhere, resumed, and the metrics are those of a run that was never touched.

Runs live in processes forked from one that has imported everything, so that a life costs a second.
They die by SIGKILL in three ways: at the nth thing that they do to a file of their run; in the
middle of a write, at a random byte; at a random time.

    pytest -m slow tests/test_killed.py                  # 4 deaths in each of 4 settings
    pytest -m seeds tests/test_killed.py                 # 48 in each of 6
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import save_small

SMALL = """--run-name a --sft-steps 3 --sft-batch-size 2 --num-updates 5 --num-prompts 2
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
TOUCHES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
PATIENCE, GRACE = 120, 3  # seconds that a life may take, and that the others of a dead rank have


def live(args, folder, environment, fate, touches):
    """What happens in the child: a run, with `fate` how it ends before its time."""
    os.chdir(folder)
    os.environ.update(environment)
    if "RANK" in environment and environment["RANK"] != "0":
        fate = {k: v for k, v in fate.items() if k == "time"}
    sys.stdout = sys.stderr = open("said.txt", "a")  # noqa: SIM115
    seen = 0

    def watch(event, arguments):
        nonlocal seen
        if event not in TOUCHES or threading.current_thread() is not threading.main_thread():
            return
        path = str(arguments[0])
        if not (path.startswith("runs") or "/runs/" in path):
            return
        if event == "open" and not _writes(arguments):
            return
        seen += 1
        touches.append(f"{event} {path}")
        if seen == fate.get("touch"):
            if "bytes" not in fate:
                os.kill(os.getpid(), signal.SIGKILL)
            # the system ends the process in the middle of the first file that outgrows this
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (fate["bytes"], fate["bytes"]))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    import train

    sys.addaudithook(watch)
    sys.exit(train.run_command(args))


def _writes(arguments):
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


@pytest.fixture(scope="module")
def lives():
    """Start lives by `begin(args, folder, ranks, fate)`; gives their exit codes and touches."""
    context = multiprocessing.get_context("forkserver")
    os.environ["OMP_NUM_THREADS"] = "1"
    context.set_forkserver_preload(["train", "core.report.compare", "core.report.curves", "peft"])
    manager = context.Manager()

    def begin(args, folder, ranks=1, fate=None):
        touches = manager.list()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(ranks):
            environment = {} if ranks == 1 else {
                "TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            }  # fmt: skip
            told = (args, str(folder), environment, fate or {}, touches if rank == 0 else [])
            children.append(context.Process(target=live, args=told))
            children[-1].start()
        victim = children[random.Random(str(fate)).randrange(ranks)]
        if fate and "time" in fate:
            victim.join(fate["time"])
            if victim.is_alive():
                victim.kill()
        ended = [child.sentinel for child in children]
        assert multiprocessing.connection.wait(ended, PATIENCE), "it hangs"
        for child in children:  # one that lost another ends by itself, or as torchrun would end it
            child.join(GRACE if any(c.exitcode for c in children) else PATIENCE)
            if any(c.exitcode for c in children):
                child.kill()
                child.join()
            assert not child.is_alive(), "it hangs"
        return [child.exitcode for child in children], list(touches)

    yield begin
    manager.shutdown()


def metrics_of(folder):
    lines = (folder / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines
    ]


def kinds(touches):
    """What was touched, without numbers and process ids: 'open .part-*/config.yaml', .."""
    return [plain(touch) for touch in touches]


def plain(touch):
    event, _, path = touch.partition(" ")
    parts = Path(path).parts
    parts = parts[parts.index("runs") + 1 :]
    return f"{event} {'/'.join('#' if any(c.isdigit() for c in p) else p for p in parts)}"


def draw_fates(rng, touches, number, seconds):
    """Ways to die: a third at touches, every kind of touch once first; a third in writes."""
    first = {}
    for i, kind in enumerate(kinds(touches)):
        first.setdefault(kind, i + 1)
    rare = list(first.values())
    rng.shuffle(rare)
    fates = [{"touch": n} for n in rare]
    for _ in range(number):
        fates.append({"touch": rng.randrange(1, len(touches) + 1)})
        size = int(10 ** rng.uniform(0, 5.3))
        fates.append({"touch": rng.randrange(1, len(touches) + 1), "bytes": size})
        fates.append({"time": rng.uniform(0.05, 1.2 * seconds)})
    rng.shuffle(fates)
    return fates[:number]


def die_and_go_on(lives, tmp_path, setting, number, seed):
    """Kill runs `number` times in all, five times each, and compare each with one left alone."""
    ranks = 2 if setting.startswith("two ranks") else 1
    model = save_small("qwen3", tmp_path / "model")
    flags = [*SMALL, "--model-id", str(model), *SETTINGS[setting].split()]
    whole = tmp_path / "whole"
    whole.mkdir()
    started = time.monotonic()
    codes, touches = lives(flags, whole, ranks)
    seconds = time.monotonic() - started
    assert codes == [0] * ranks, (whole / "said.txt").read_text()[-2000:]
    expected = metrics_of(whole)
    rng = random.Random(seed)
    deaths, died_at = 0, []
    fates = iter(draw_fates(rng, touches, 4 * number, seconds))
    run = 0
    while deaths < number:
        run += 1
        folder = tmp_path / f"run{run}"
        folder.mkdir()
        (folder / "said.txt").touch()
        for fate in [*(next(fates) for _ in range(5)), {}]:
            going_on = (folder / "runs" / "a").exists()
            args = ["--resume", "runs/a"] if going_on else flags
            codes, seen = lives(args, folder, ranks, fate)
            said = (folder / "said.txt").read_text()[-2000:]
            if all(code == 0 for code in codes):  # it was over before its hour came
                continue
            assert (fate and -signal.SIGKILL in codes) or -signal.SIGXFSZ in codes, (codes, said)
            deaths += 1
            died_at += kinds(seen[-1:])
        assert metrics_of(folder) == expected, (run, said)
        assert not list((folder / "runs").glob("**/checkpoint/.part*"))
        shutil.rmtree(folder)
    return died_at


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["full", "lora", "ppo", "two ranks"])
def test_a_killed_run_goes_on_to_the_same_metrics(lives, tmp_path, setting):
    die_and_go_on(lives, tmp_path, setting, number=4, seed=1)


@pytest.mark.seeds
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_killed_48_times_goes_on_to_the_same_metrics(lives, tmp_path, setting):
    died_at = die_and_go_on(lives, tmp_path, setting, number=48, seed=0)
    print(f"{setting}: {len(died_at)} deaths at {len(set(died_at))} kinds of places")
    assert len(set(died_at)) >= 8
