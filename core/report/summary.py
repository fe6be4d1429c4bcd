"""Summarizes a run: totals, the README.md in its folder, and the last lines on the screen."""

from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from core.algorithm import algorithm_names, is_file, load_algorithm, name_of, title_of
from core.config import (
    COMMAND_LINE_ONLY,
    SMOLLM2,
    TINY,
    Config,
    needs,
    resolve,
    trust_flags,
    validate,
)
from core.results import accuracy_of, before_after
from core.run import cli
from core.run.diagnostics import earned_nothing
from core.run.files import published
from core.run.folder import quoted, read_config, train_command
from core.run.log import METRICS, Record, read_records
from core.tasks import check_demonstrations, training_envs
from core.types import UsageError
from environments.plumbing.registry import EnvSpec, relative

BASELINES = {"groups", "value_head"}  # needs (core/algorithm.py) that tell baselines apart
TARGET_ACCURACY = 0.9  # `tokens_to_target` counts the tokens until this held-out accuracy

README = """\
# {name}

`{algo}` on `{env}`, model `{model_id}`, seed {seed}: {sft_steps} warm-start steps, {updates} updates,
{minutes:.1f} min (torch {torch}, {threads} threads).
{results}
To repeat the run under another name:

    {command}

`report.html` shows the rollouts and their tokens, `metrics.jsonl` and `rollouts.jsonl` hold the data,
and `model/` loads with `from_pretrained`.
{system_prompt}"""  # noqa: E501
SYSTEM_PROMPT = """
Every episode began with this system message:

    {}
"""
RESULTS = """
| held-out tasks | before RL [95%] | after RL [95%] |
| --- | --- | --- |
{rows}

![curves](curves.png)
"""


def algorithm_title(config: dict[str, Any]) -> str:
    """The algorithm of a run, and its variant if it has one.

    >>> algorithm_title({"algo": "/home/me/mine.py", "mine": {"loss_type": "first"}})
    'mine (first)'
    """
    options = config.get(name_of(str(config["algo"])))
    variant = options.get("loss_type") if isinstance(options, dict) else ""
    return title_of(str(config["algo"]), variant or "")


def write_readme(run_dir: Path, config: dict[str, Any], records: list[Record]) -> None:
    """Writes README.md of a run: settings, held-out accuracy before and after, how to repeat it."""
    rows = [
        f"| {env} | {accuracy_of(env, first)} | {'' if last is first else accuracy_of(env, last)} |"
        for env, first, last in before_after(records)
    ]
    import torch  # takes seconds, which other commands that need this file do not wait for

    prompt = config.get("system_prompt", "")
    text = README.format(
        **{key: config[key] for key in ("model_id", "seed", "sft_steps")},
        algo=algorithm_title(config),
        name=run_dir.name,
        env=" ".join(EnvSpec(env).short for env in config["env"]),
        updates=num_updates(records),
        minutes=minutes(records),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        results=RESULTS.format(rows="\n".join(rows)) if rows else "",
        command=repeat_command(run_dir, config),
        system_prompt=SYSTEM_PROMPT.format("\n    ".join(prompt.splitlines())) if prompt else "",
    )
    with published(run_dir / "README.md") as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def repeat_command(run_dir: Path, config: dict[str, Any]) -> str:
    """Returns the command that repeats a run under another name."""
    file = run_dir / "config.yaml"
    flags = ["--config", str(file), "--run-name", "again", *trust_flags(config, file)]
    return quoted(["python", "train.py", *flags])


def final_lines(run_dir: Path, config: dict[str, Any]) -> list[str]:
    """Returns the lines that end a run: accuracy before and after, warnings, files, a next step."""
    records = read_records(run_dir / METRICS)
    lines = [
        f"{env}, held-out accuracy [95%]: {_change(env, first, last)}"
        for env, first, last in before_after(records)
    ]
    for name, updates, message in logged_warnings(records):
        lines.append(f"warning at update {', '.join(map(str, updates))}: {name}: {message}")
    lines.append(f"curves: {run_dir / 'curves.png'}   rollouts: {run_dir / 'report.html'}")
    if config["sampler"] != "openai":
        flags = ["--before", *trust_flags(config, run_dir / "config.yaml")]
        lines.append(f"talk to it: {quoted(['python', '-m', 'core.chat', str(run_dir), *flags])}")
        lines.append(f"next: {next_step(run_dir, records)}")
    return lines


def next_step(run_dir: Path, records: list[Record]) -> str:
    """Returns a command to go on with, which has the settings of the run but for one.

    After an evaluation alone, training. Without any reward, a warm start, a better model or a check
    of the environment. After exercises of scratch.py that did not learn, their check. Otherwise
    GRPO, then PPO, then a better model, then other seeds: no suggestion leads back.
    """
    cfg = as_given(read_config(run_dir / "config.yaml", trust=True))
    is_scratch = name_of(cfg.algo) == "scratch"
    if cfg.num_updates == 0:
        return train_command(*flags_of(replace(cfg, num_updates=Config.num_updates)))
    if earned_nothing(records) and not is_scratch:
        return _after_no_reward(cfg)
    keys = [(first, last, f"eval/{env}/accuracy") for env, first, last in before_after(records)]
    if is_scratch and keys and not any(last[key] > first[key] for first, last, key in keys):
        return quoted(["python", _relative_path(cfg.algo) if is_file(cfg.algo) else "scratch.py"])
    own, baseline = is_scratch or is_file(cfg.algo), BASELINES & needs(resolve(cfg))
    for algo in (Config.algo, *algorithm_names()) if own or "value_head" not in baseline else ():
        with suppress(UsageError):
            options = cfg.options if algo == cfg.algo else Config.options
            other = as_given(replace(cfg, algo=algo, options=options))
            validate(resolve(other))
            if name_of(algo) != "scratch" and (
                own or BASELINES & needs(resolve(other)) != baseline
            ):
                return train_command(*flags_of(other))
    with suppress(UsageError):
        return _on_smollm2(cfg)
    return train_command(*flags_of(replace(cfg, seed=cfg.seed + 1)))


def _on_smollm2(cfg: Config) -> str:
    """The command with a better model. Raises UsageError if there is none or settings forbid it."""
    if cfg.model_id not in TINY:
        raise UsageError(f"{cfg.model_id} is no worse")
    cfg = replace(cfg, model_id=SMOLLM2, lora_rank=cfg.lora_rank or 16)
    validate(resolve(cfg))
    return train_command(*flags_of(cfg))


def _after_no_reward(cfg: Config) -> str:
    if cfg.sft_steps == 0:
        with suppress(UsageError):
            check_demonstrations(training_envs(cfg.env, cfg.train_difficulty))
            steps = 800 if cfg.model_id == "tiny-random" else 200
            return train_command(*flags_of(replace(cfg, sft_steps=steps)))
    with suppress(UsageError):
        return _on_smollm2(cfg)
    return quoted(["python", "-m", "environments", "check", relative(cfg.env[0])])


def as_given(cfg: Config) -> Config:
    """Returns the settings that a command has to give; all others have their defaults again."""
    resolved = resolve(cfg)
    for setting in fields(Config):
        default: dict[str, Any] = {setting.name: setting.default}
        shorter = replace(cfg, **default)
        if setting.name != "algo" and resolve(shorter) == resolved:
            cfg = shorter
    for name, value in vars(load_algorithm(cfg.algo).Options()).items() if cfg.options else ():
        shorter = replace(cfg, options=replace(cfg.options, **{name: value}))  # type: ignore[type-var]
        if resolve(shorter) == resolved:
            cfg = shorter
    return cfg


def flags_of(cfg: Config) -> list[str]:
    """Returns the flags of `as_given` settings, without what belongs to one run, like its name."""
    left_out = ("run_name", "template_date", *COMMAND_LINE_ONLY)
    usual: dict[str, Any] = {name: getattr(Config, name) for name in left_out}
    env, eval_env = (tuple(map(relative, specs)) for specs in (cfg.env, cfg.eval_env))
    algo = _relative_path(cfg.algo) if is_file(cfg.algo) else cfg.algo
    cfg = replace(cfg, env=env, eval_env=eval_env, algo=algo, **usual)
    return cli.flags_of(cfg, "env", "seed", "algo")


def _relative_path(path: str) -> str:
    file = Path(path)
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def _change(env: str, first: Record, last: Record) -> str:
    """The accuracy before RL and after; the accuracy alone where no update followed."""
    p, trivial, tasks = (last.get(f"eval/{env}/{key}") for key in ("p_value", "trivial", "tasks"))
    line, parts = accuracy_of(env, first), []
    if last is not first:
        line += f" before RL -> {accuracy_of(env, last)} after {last['update']} updates"
        if p is not None:
            verdict = "a clear change" if p < 0.05 else "may be chance"
            parts.append(f"{verdict}: {tasks or 'the same'} tasks, McNemar's p = {p:.1g}")
    parts += [] if trivial is None else [f"trivial baseline: {trivial:.2f}"]
    return f"{line}  ({'; '.join(parts)})" if parts else line


def logged_warnings(records: list[Record]) -> list[tuple[str, list[int], str]]:
    """Returns the warnings in the records of a log: (name, updates that raised it, first message).

    >>> first, second = {"dead_groups": "all returns equal"}, {"dead_groups": "again"}
    >>> logged_warnings([{"update": 5, "warnings": first}, {"update": 9, "warnings": second}])
    [('dead_groups', [5, 9], 'all returns equal')]
    """
    warnings: dict[str, tuple[str, list[int], str]] = {}
    for record in records:
        for name, message in (record.get("warnings") or {}).items():
            warnings.setdefault(name, (name, [], message))[1].append(record["update"])
    return list(warnings.values())


def num_updates(records: list[Record]) -> int:
    """Returns the number of the last update; 0 before the first."""
    return max((record["update"] for record in records if "update" in record), default=0)


def minutes(records: list[Record]) -> float:
    """Returns the minutes spent in warm start, sampling, training and evaluation."""
    return sum(v for r in records for k, v in r.items() if k.startswith("time/") and v) / 60


def sampled_tokens(records: list[Record]) -> int:
    """Returns the number of tokens sampled for training."""
    return sum(record.get("tokens/sampled") or 0 for record in records)


def accuracy_by_tokens(env: str, records: list[Record]) -> list[tuple[int, float]]:
    """Returns (tokens sampled for training so far, held-out accuracy) of each evaluation on `env`.

    >>> updates = [{"eval/a/accuracy": 0.2}, {"tokens/sampled": 70}, {"tokens/sampled": 30}]
    >>> updates[2]["eval/a/accuracy"] = 0.9
    >>> accuracy_by_tokens("a", updates)
    [(0, 0.2), (100, 0.9)]
    """
    tokens, points = 0, list[tuple[int, float]]()
    for record in records:
        tokens += record.get("tokens/sampled") or 0
        if (accuracy := record.get(f"eval/{env}/accuracy")) is not None:
            points.append((tokens, accuracy))
    return points


def tokens_to_target(env: str, records: list[Record]) -> int | None:
    """Returns the tokens sampled for training up to the first evaluation with TARGET_ACCURACY on
    `env`; None if no evaluation reached it."""
    points = accuracy_by_tokens(env, records)
    return next((tokens for tokens, accuracy in points if accuracy >= TARGET_ACCURACY), None)
