"""Run `python train.py FLAGS`, or a sweep over any of its flags, on a Flyte 2 cluster or here.

    python runs/on_flyte.py --algo ppo --num-updates 20           # one run on the cluster
    python runs/on_flyte.py --sweep seed 0 1 2 --sweep algo grpo ppo --lr 5e-5      # six runs
    python runs/on_flyte.py --local --sweep seed 0 1 2 --num-updates 10             # without Flyte

A sweep runs all combinations of the values; those of a switch are true and false. The cluster is
that of .flyte/config.yaml (`flyte create config`). A run that fails is a row of the table that says
why. Exit code: 1 if a run failed, 2 for invalid input.
"""

import argparse
import itertools
import os
import sys
import tomllib
from pathlib import Path
from subprocess import PIPE, Popen

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from core import settings  # noqa: E402
from core.files.run_log import read_records  # noqa: E402
from core.results import accuracy_of, before_after  # noqa: E402
from runs.record import markdown  # noqa: E402

try:
    import flyte
    from flyte.io import Dir
except ImportError:  # --local works without Flyte
    flyte = None


def main(args: list[str]) -> int:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style, allow_abbrev=False)
    parser.add_argument("--gpu", action="store_true", help="use machines with a GPU")
    parser.add_argument("--local", action="store_true", help="run here, without Flyte")
    sweep = parser.add_argument("--sweep", nargs="+", action="append", help="all combinations")
    sweep.default, sweep.metavar = [], ("FLAG", "VALUE")
    options, flags = parser.parse_known_args(args)
    if bare := [flag for flag, *values in options.sweep if not values]:
        parser.error(f"--sweep {bare[0]} has no values; write --sweep {bare[0]} VALUE VALUE")
    if flyte and not options.local:
        flyte.init_from_config(root_dir=ROOT)
    if not (options.local or (flyte and flyte.is_control_plane_available())):
        parser.error('no cluster: pip install -e ".[flyte]", flyte create config, or use --local')
    runs = plan(options.sweep, flags)
    flag_lists = [*runs.values()]
    results = [*map(train_once, flag_lists)] if options.local else run_on_flyte(flag_lists)
    rows = [[label, *result] for label, result in zip(runs, results, strict=True)]
    print("\n".join(markdown("run | held-out accuracy before and after RL [95%] | folder", rows)))
    return int(any(result.startswith("failed: ") for result, _ in results))


def plan(sweep: list[list[str]], flags: list[str]) -> dict[str, list[str]]:
    """The flags of each run, by its flags of the sweep. Exits with a message for wrong ones."""
    free = (n for n in itertools.count(1) if not Path(f"runs/sweep-{n}").exists())
    axes = []
    for flag, *values in sweep:
        switch = {"true": f"--{flag}", "false": f"--no-{flag}"}
        axes.append([switch.get(value, f"--{flag} {value}") for value in values])
    runs = {}
    for words in map(" ".join, itertools.product(*axes)):
        runs[words] = [*flags, *words.split(), "--run-name", f"sweep-{next(free)}"]
        settings.parse(runs[words])
    return runs


def train_once(flags: list[str]) -> list[str]:
    """Trains; returns the accuracies, or why the run failed, and its folder."""
    folder = Path("runs", flags[-1])
    process = Popen([sys.executable, ROOT / "train.py", *flags], stderr=PIPE, encoding="utf-8")
    try:
        errors = process.communicate()[1]
    finally:
        process.wait()  # on Ctrl-C the run saves a checkpoint before it stops
    sys.stderr.write(errors)
    if process.returncode:
        reasons = [line for line in errors.splitlines() if line.startswith("train.py: ")]
        return ["failed: " + [*reasons, f"exit code {process.returncode}"][0], ""]
    accuracies = []
    for env, first, last in before_after(read_records(folder / "metrics.jsonl")):
        accuracies.append(f"{env}: {accuracy_of(env, first)}, {accuracy_of(env, last)}")
    return ["; ".join(accuracies) or "not evaluated", str(folder)]


def run_on_flyte(runs: list[list[str]], mode: str = "remote") -> list[list[str]]:
    run = flyte.with_runcontext(mode=mode, copy_style="all").run(sweep, runs)
    print(f"Flyte: {run.url}")
    run.wait()
    return run.outputs()[0]


if flyte is not None:
    # tasks are made when this file is imported, on the cluster too: from a flag or the environment
    gpu = bool("--gpu" in sys.argv or os.environ.get("PICORL_GPU"))
    cpu, memory = (8, "48Gi") if gpu else (4, "8Gi")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = project["dependencies"] + project["optional-dependencies"]["vllm"] * gpu
    environment = flyte.TaskEnvironment(
        name="picorl",
        resources=flyte.Resources(cpu=cpu, memory=memory, gpu="L40s:1" if gpu else None),
        image=flyte.Image.from_debian_base(name="picorl").with_pip_packages(*packages),
        env_vars={"PICORL_GPU": "1" * gpu, "OMP_NUM_THREADS": str(cpu)},
    )

    @environment.task
    def train(flags: list[str]) -> tuple[list[str], Dir]:
        result, folder = train_once(flags)[0], Path("runs", flags[-1])
        folder.mkdir(parents=True, exist_ok=True)  # a run with a wrong setting has none
        stored = Dir.from_local_sync(folder)
        return [result, stored.path], stored

    @environment.task
    def sweep(runs: list[list[str]]) -> list[list[str]]:
        results = flyte.map(train, runs, concurrency=8, return_exceptions=True)
        return [[f"failed: {x!r}", ""] if isinstance(x, Exception) else x[0] for x in results]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
