"""Fixtures: small models with random weights, policies loaded from them, the command line.

Slow imports stand in functions: the process with which `pytest -n` starts the others needs none.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when Hugging Face's libraries are imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread makes small tensors slower

import copy
import gc
import json
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import cache
from http.server import ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from core.types import Rollout, Turn

FAMILIES = ("Qwen3", "Qwen2", "Llama", "Gemma3")  # supported by both samplers

AGENTS = Path(__file__).parents[1] / "environments" / "agents"
SMALL = """--num-updates 1 --num-prompts 2 --group-size 2 --eval-num-tasks 2 --max-tokens 4
    --device cpu""".split()  # a run of one small update
PROGRAM = f"agent:run={Path(__file__).parent}/agent_program.py:run,data={AGENTS}/sums.jsonl"


def pytest_configure():
    """Processes that tests start inherit ignored signals: a shell ignores SIGINT in background
    jobs, and nohup ignores SIGHUP."""
    for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    gc.disable()


def pytest_collection_finish():
    """The garbage collector, off while modules are imported, never looks at these."""
    if "triton" not in sys.modules:  # its version 3.9 prints what is not collected
        gc.freeze()
    gc.enable()


def pytest_runtest_setup():
    """Libraries that an earlier test used may have set a handler of their own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_for_the_end_of(pid):
    """Until the process, which nobody may have reaped, has ended."""
    import psutil

    for _ in range(6000):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
                continue
        return
    raise AssertionError("it goes on")


def needs(extra, *modules):
    """Skips a test, and names the extra, if one of its modules is not installed."""
    absent = any(find_spec(module) is None for module in modules)
    return pytest.mark.skipif(absent, reason=f"needs picorl[{extra}]")


@contextmanager
def loopback(handler):
    """A server with this handler on a free port of loopback, at `url`; `asked` is for what the
    handler notes."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.handle_error = lambda *_: None  # clients may end their connection early
        server.asked, server.url = [], f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@pytest.fixture
def tab():
    """A tab of Chromium, which must be installed, the addresses that it fetches, and the errors
    that it reports. In the end no text has run as a script."""
    from playwright.sync_api import sync_playwright

    flags = """--no-sandbox --disable-gpu --disable-quic --no-first-run
        --disable-background-networking --disable-component-update --disable-sync""".split()
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        page, requests, errors = browser.new_page(), [], []
        page.set_default_timeout(10_000)
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page, requests, errors
        assert errors == [] and page.evaluate("typeof window.ran") == "undefined"
        browser.close()


def save_small(family, folder, **changes):
    """Saves a model of 2 layers with random weights and biases, and the tokenizer of tiny."""
    from small_models import save_model

    shape = {"vocab_size": 704, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8,
             "initializer_range": 0.2}  # fmt: skip
    return save_model(family, folder, **shape | changes)


def load_small(folder, **options):
    """`load_policy` on the CPU. Reads the files once, and returns a copy that a test may change."""
    import torch

    torch.manual_seed(options.get("seed", 0))
    return copy.deepcopy(_load_once(str(folder), tuple(sorted(options.items()))))


@cache
def _load_once(folder, options):
    from core.config import Config
    from core.loading import load_policy

    settings = dict(options)
    value_head = settings.pop("value_head", False)
    return load_policy(Config(device="cpu", **settings), folder, value_head=value_head)


def metrics_of(run):
    """The records of a run, but for its times."""
    lines = Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = map(json.loads, lines)
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in records]


def rollouts_of(num_groups, size, prompt):
    """Groups whose prompts have `prompt`, `prompt` + 7, .. tokens; every second rollout has a
    second turn."""
    import torch

    generator, rollouts = torch.Generator().manual_seed(0), []

    def ids_of(count):
        return torch.randint(5, 300, (count,), generator=generator).tolist()

    for group in range(num_groups):
        opening = ids_of(prompt + 7 * group)
        for member in range(size):
            turns, context = [], opening
            for _ in range(1 + member % 2):
                completion = ids_of(1 + (5 * member + group) % 12)
                turns.append(Turn(context, completion, [-5.0] * len(completion), "stop"))
                context = context + completion + ids_of(3)
            rollouts.append(Rollout("test", "player", group, group, [], turns))
    return rollouts


@pytest.fixture(scope="session", params=FAMILIES)
def small_folder(request, tmp_path_factory):
    return save_small(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory):
    return save_small("Qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def policy(qwen3_folder):
    return load_small(qwen3_folder)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs `python train.py ARGS` in an empty folder; returns (exit code, stdout, stderr).

    Writes no curves.png, which takes longer than the few small updates of a test, and does not
    wait for the disk. What the test imports from its folder is forgotten afterwards.
    """
    import train
    from core.report import curves
    from environments import rewarded
    from environments.base import RunInfo

    monkeypatch.chdir(tmp_path)
    rewarded.begin_run(RunInfo((), ()))  # forgets another test's file of the same relative name
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(curves, "draw_curves", lambda *_: None)
    monkeypatch.setattr(os, "fsync", lambda handle: None)

    def run(*args):
        try:
            code = train.execute([str(a) for a in args])
        except SystemExit as exit_:  # raised by tyro
            code = exit_.code
        return code, *capsys.readouterr()

    yield run
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", None)):
            del sys.modules[name]
