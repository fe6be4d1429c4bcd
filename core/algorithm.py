"""Finds the algorithm that --algo names: a file of algorithms/, FILE.py, or scratch.py's exercises.

An algorithm is a module with

    compute_advantages(tokens, options)   returns the advantages [S], or a dict with them, other
                                          vectors and numbers for the log
    compute_loss(tokens, options)         the loss, and metrics as sums over its tokens
    Options                               a frozen dataclass, whose fields are flags, such as
                                          --grpo.clip-high; LoopOptions has what the loop reads of
                                          it, too

`Options.needs` lists what an algorithm needs beyond the rewards of single rollouts, as keys of
NEEDS. algorithms/README.md has an example of an algorithm.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import algorithms
from algorithms.options import LoopOptions
from core.faults import UsageError
from environments.plumbing.registry import describe_error, find_file, import_file

FOLDER = Path(algorithms.__file__).parent
WORKSHOP = "core.workshop.as_algorithm"  # of --algo scratch and scratch.py
PARTS = ("compute_advantages", "compute_loss", "Options")
NO_OPTIONS = "; `from algorithms.options import LoopOptions`, `class Options(LoopOptions): pass`"
NEEDS = {  # key -> its meaning, and the settings that contradict it (config.is_set)
    "groups": ["compares the rollouts of a group: --group-size 2 or more"],
    "value_head": ["reads the values that the policy estimates, before the first step too"],
    "old_logprobs": ["reads tokens.old_logprobs in compute_advantages"],
    "turn_credit": ["credits each token by itself: --credit turn", "credit=episode"],
    "episode_credit": ["knows no turns: --credit episode", "credit=turn"],
    "feedback": ["learns from what would have been right: Step.feedback, or demonstrate()"],
    "own_kl": ["has a KL of its own, a term of the loss", "kl_estimator"],
    "own_draw": ["draws tokens itself, with torch", "top_p", "top_k", "sampler=vllm server openai"],
}


@dataclass(frozen=True)
class Algorithm:
    """The functions of an algorithm."""

    compute_advantages: Callable[[Any, Any], Any]
    compute_loss: Callable[[Any, Any], Any]
    file: Path  # a run keeps a copy of a file of the user's
    # of scratch.py only: exercises in place of functions of the library
    weighted_kl: Callable[..., Any] | None = None  # algorithms/kl.py
    draw: Callable[..., Any] | None = None  # core/sampler.py
    variant: str = ""  # follows the name in the title of a run
    remarks: tuple[str, ...] = ()  # lines to show when the run starts


@cache
def algorithm_names() -> list[str]:
    """The values of --algo that are not the path of a file."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in FOLDER.rglob("*.py")}
    return [*sorted(name for name, text in texts.items() if "\nclass Options(" in text), "scratch"]


def is_file(algo: str) -> bool:
    """Whether --algo names a file of the user's."""
    return algo.endswith(".py")


def name_of(algo: str) -> str:
    """The name of an algorithm in flags, titles and config.yaml.

    >>> name_of("grpo"), name_of("/home/me/mine.py")
    ('grpo', 'mine')
    """
    return Path(algo).stem


def title_of(algo: str, variant: str = "") -> str:
    """The name of an algorithm and its variant, such as --grpo.loss-type, if that says more.

    >>> title_of("grpo", "dapo"), title_of("cispo", "cispo"), title_of("/home/me/mine.py")
    ('grpo (dapo)', 'cispo', 'mine')
    """
    name = name_of(algo)
    return name if variant in ("", name) else f"{name} ({variant})"


def absolute_algorithm(algo: str) -> str:
    """`algo`, as an absolute path if it is a file."""
    return str(Path(algo).expanduser().absolute()) if is_file(algo) else algo


def load_algorithm(cfg: Any) -> Algorithm:
    """The algorithm of a run with the settings `cfg`, a `Config` with options.

    Raises UsageError as `options_of` does, and if exercises of scratch.py are not written yet.
    """
    module = _load(cfg.algo)
    if module.__name__ == WORKSHOP:
        return module.load_scratch(cfg)
    compute_loss = partial(_loss_and_metrics, module.compute_loss)
    return Algorithm(module.compute_advantages, compute_loss, Path(module.__file__))


def options_of(algo: str) -> type[LoopOptions]:
    """The `Options` of an algorithm, which is imported.

    Raises UsageError for a name that does not exist, and for a file that cannot be used.
    """
    return _load(algo).Options


def _loss_and_metrics(compute_loss: Any, *args: Any) -> tuple[Any, dict[str, float]]:
    """What `compute_loss` returns; raises UsageError if it is no loss with a dict of numbers."""
    result = compute_loss(*args)
    loss, sums = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(sums, dict) or not getattr(loss, "requires_grad", False) or loss.shape:
        raise UsageError("compute_loss: return (loss, metrics): a scalar with its gradient, a dict")
    numbers = {name: x.item() for name, x in sums.items() if getattr(x, "shape", None) == ()}
    for name, value in (sums | numbers).items():
        if not isinstance(value, int | float):
            raise UsageError(f"compute_loss: the metric {name} is no number: return a sum")
    return loss, sums | numbers


def _load(algo: str) -> Any:
    """The module of an algorithm, with `PARTS`; for exercises WORKSHOP, with `load_scratch`."""
    if algo == "scratch":
        return importlib.import_module(WORKSHOP)
    if not is_file(algo):
        if algo not in algorithm_names():
            names = ", ".join(algorithm_names())
            raise UsageError(f"--algo {algo}: choose {names}, or FILE.py of your own")
        is_variant = (FOLDER / f"variants/{algo}.py").exists()
        package = "algorithms.variants" if is_variant else "algorithms"
        return importlib.import_module(f"{package}.{algo}")
    name = name_of(algo)
    try:
        file = find_file(algo)
        text = file.read_text(encoding="utf-8", errors="replace")
        is_scratch = name == "scratch" or "core.workshop.checker" in text  # or a copy of scratch.py
        if is_scratch and not all(part in text for part in PARTS):
            return importlib.import_module(WORKSHOP)  # imports the file when a run starts
        module = import_file(file)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--algo {algo}: {describe_error(error)}") from error
    missing = [part for part in PARTS if not hasattr(module, part)]
    if missing:
        hint = NO_OPTIONS if "Options" in missing else ""
        raise UsageError(f"--algo {algo}: it has no {' and no '.join(missing)}{hint}")
    options: type = module.Options
    if not issubclass(options, LoopOptions):  # the loop reads them, too
        options = type("Options", (options, LoopOptions), {"__module__": module.__name__})
    vars(module)["Options"] = options if is_dataclass(options) else dataclass(frozen=True)(options)
    return module
