"""`python train.py FLAGS`, or a sweep over any of its flags, on Flyte 2 or one after another here.

python runs/on_flyte.py --algo ppo --num-updates 20                     # one run on the cluster
python runs/on_flyte.py --sweep seed=0,1,2 algo=grpo,ppo -- --lr 5e-5   # six: the cross product
python runs/on_flyte.py --local --sweep seed=0,1,2 -- --num-updates 10  # here, without Flyte

Values with commas: 'env=reverse;gymnasium:id=CartPole-v1,repeat=3'. Switches are true or false.
The cluster is that of .flyte/config.yaml (`flyte create config`). A run that fails costs its own
row of the table; the exit code is 1 if any did, and 2 for input that can't be meant.
"""

import argparse
import io
import itertools
import json
import os
import re
import sys
import time
import tomllib
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from subprocess import PIPE, Popen

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from core import cli  # noqa: E402
from core.metrics import before_after, describe  # noqa: E402
from core.run_dir import new_folder  # noqa: E402
from core.run_log import read_records  # noqa: E402
from core.types import UsageError  # noqa: E402
from train import Config  # noqa: E402

try:
    import flyte
    from flyte.io import Dir
except ImportError:  # --local does without
    flyte = None

# what a run gets on the cluster, and which extras of pyproject.toml its image has
CPU: dict = {"extras": [], "resources": {"cpu": 4, "memory": "8Gi"}}
GPU: dict = {"extras": ["vllm"], "resources": {"cpu": 8, "memory": "48Gi", "gpu": "L40s:1"}}
ON = "gpu" if "--gpu" in sys.argv else os.environ.get("PICORL_ON", "cpu")  # set in containers
MACHINE = {"cpu": CPU, "gpu": GPU}[ON]
WAITING = {"cpu": 1, "memory": "2Gi"}  # of the task that waits for the runs
AT_ONCE = 8  # runs at the same time on the cluster; locally it is one
TITLES = ["run", "held-out tasks", "before RL [95%]", "after RL [95%]", "minutes", "folder"]
Rows = list[list[str]]  # of the table, without the first column


def main(args: list[str]) -> int:
    """Train, print the table, return the exit code."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(None, None, __doc__, formatter_class=style, allow_abbrev=False)
    parser.add_argument("--sweep", nargs="*", metavar="FLAG=VALUE,VALUE", help="all combinations")
    parser.add_argument("--gpu", action="store_true", help="on a machine with a GPU")
    parser.add_argument("--local", action="store_true", help="here, without Flyte")
    parser.add_argument("--flyte-local", action="store_true", help="here, in Flyte's local mode")
    end = args.index("--") if "--" in args else len(args)
    mine, flags = parser.parse_known_args(args[:end])
    try:
        labels, runs = plan(mine.sweep, flags + args[end + 1 :])
        done = run_here(runs) if mine.local else run_on_flyte(runs, mine.flyte_local)
    except UsageError as error:
        print(f"on_flyte.py: {error}", file=sys.stderr)
        return 2
    rows = [[label, *row] for label, some in zip(labels, done, strict=True) for row in some]
    table = Table(*TITLES[:-1], box=None)  # the folder would make it too wide
    for row in rows:
        table.add_row(*map(escape, row[:-1]))
    Console().print(table)
    if mine.sweep:
        kept = Path("runs", runs[0][-1].rpartition("-")[0], "table.md")
        kept.parent.mkdir(parents=True, exist_ok=True)
        lines = ["|".join(x.replace("|", "¦") for x in r) for r in [TITLES, ["-"] * 6, *rows]]
        kept.write_text("".join(f"|{line}|\n" for line in lines))
        print(f"the table as Markdown, with the folders: {kept}")
    return int(any(row[2].startswith("failed: ") for row in rows))


def plan(sweep: list[str] | None, flags: list[str]) -> tuple[list[str], list[list[str]]]:
    """Of each run its label and its flags, its name last. UsageError: not what train.py takes."""
    axes = [axis_of(text) for text in sweep or []]
    names = {axis[0][0].partition("=")[0] for axis in axes}
    if sweep is not None and len(names) < max(1, len(axes)):
        raise UsageError("--sweep names each flag once, and at least one: --sweep seed=0,1,2")
    chosen = list(itertools.product(*axes))
    runs = [[*flags, *itertools.chain(*(words for _, words in choice))] for choice in chosen]
    settings = [parsed(run) for run in runs]
    if any(s.resume for s in settings):
        raise UsageError("--resume goes on with a folder of this machine: python train.py --resume")
    stem = new_folder(Path("runs"), settings[0].run_name, "sweep" if axes else "run").name
    named = [[*r, "--run-name", f"{stem}-{i + 1}" if axes else stem] for i, r in enumerate(runs)]
    return [" ".join(label for label, _ in choice) or stem for choice in chosen], named


def axis_of(text: str) -> list[tuple[str, list[str]]]:
    """'lr=1,2' -> [('lr=1', ['--lr', '1']), ('lr=2', ['--lr', '2'])]."""
    key, _, values = text.partition("=")
    found = [value.strip() for value in values.split(";" if ";" in values else ",")]
    if not (key and all(found)) or len(set(found)) < len(found):
        raise UsageError(f"--sweep {text!r}: write flag=value,value, each value once")
    words = {"true": [f"--{key}"], "false": [f"--no-{key}"]}
    return [(f"{key}={value}", words.get(value, [f"--{key}", *value.split()])) for value in found]


def parsed(flags: list[str]) -> Config:
    """The settings of train.py that flags ask for; what it says of wrong ones, in one line."""
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(said), suppress(SystemExit):
        return cli.parse(flags)
    parts = re.split("-{9,}", said.getvalue())  # a title, what is wrong, the way to --help
    raise UsageError("train.py: " + " ".join(parts[len(parts) > 1].split()))


def train_once(flags: list[str]) -> Rows:
    """`python train.py FLAGS`; a row for each environment evaluated. RuntimeError: it failed."""
    started, folder = time.monotonic(), Path("runs", flags[-1])
    process = Popen([sys.executable, ROOT / "train.py", *flags], stderr=PIPE, text=True)
    try:
        said = process.communicate()[1]
    finally:
        process.wait()  # Ctrl-C is told to it too: it saves before it stops
    sys.stderr.write(said)
    if process.returncode:
        lines = [x for x in said.splitlines() if x.startswith("train.py: ")]
        lines += said.splitlines()[-1:] if "Traceback" in said else []
        raise RuntimeError([*lines, f"exit code {process.returncode}"][0])
    found = before_after(read_records(folder / "metrics.jsonl"))
    results = [[env, describe(env, first), describe(env, last)] for env, first, last in found]
    minutes = f"{(time.monotonic() - started) / 60:.1f}"
    return [[*one, minutes, str(folder)] for one in results or [["", "not evaluated", ""]]]


def failed(error: object) -> Rows:
    return [["", "failed: " + (str(error).strip() or repr(error)).splitlines()[0], "", "", ""]]


def run_here(runs: list[list[str]]) -> list[Rows]:
    """One after another; what Ctrl-C leaves undone has failed."""
    done: list[Rows] = []
    for flags in runs:
        try:
            done.append(train_once(flags))
        except RuntimeError as error:
            done.append(failed(error))
        except KeyboardInterrupt:
            return done + [failed("stopped")] * (len(runs) - len(done))
    return done


def run_on_flyte(runs: list[list[str]], local: bool) -> list[Rows]:
    """One run of Flyte, with an action for each of ours; waits for it."""
    if flyte is None:
        raise UsageError('Flyte is not installed: pip install -e ".[flyte]"; or train with --local')
    if not local:
        flyte.init_from_config(root_dir=ROOT)
        if not flyte.is_control_plane_available():
            raise UsageError("no Flyte cluster is configured: flyte create config; or --local")
    try:
        context = flyte.with_runcontext(mode="local" if local else "remote", copy_style="all")
        run = context.run(sweep.override(resources=flyte.Resources(**WAITING)), runs)
        print(f"Flyte: {run.url}")
        run.wait()
        return [json.loads(rows) for rows in run.outputs()[0]]
    except Exception as error:  # of the sweep itself: its image, its quota, the network
        return [failed(error)] * len(runs)


if flyte is not None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name] for name in MACHINE["extras"]]
    image = flyte.Image.from_debian_base(name="picorl")
    environment = flyte.TaskEnvironment(
        name="picorl",
        image=image.with_pip_packages(*project["dependencies"], *itertools.chain(*extras)),
        resources=flyte.Resources(**MACHINE["resources"]),
        env_vars={"PICORL_ON": ON, "OMP_NUM_THREADS": str(MACHINE["resources"]["cpu"])},
    )

    @environment.task
    def train(flags: list[str]) -> tuple[str, str, Dir]:
        """The run's rows of the table, its metrics.jsonl, and its folder with report.html."""
        rows, folder = train_once(flags), Path("runs", flags[-1])
        kept = Dir.from_local_sync(folder)
        text = json.dumps([[*row[:-1], kept.path] for row in rows])
        return text, (folder / "metrics.jsonl").read_text(), kept

    @environment.task
    def sweep(runs: list[list[str]]) -> list[str]:
        done = flyte.map(train, runs, concurrency=AT_ONCE, return_exceptions=True)
        return [json.dumps(failed(x)) if isinstance(x, Exception) else x[0] for x in done]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
