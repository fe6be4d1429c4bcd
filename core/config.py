"""Every setting of a run: its default, its help text, and the rules that settings must obey.

`Config` is the command line of train.py and the content of a run's config.yaml. The groups below
are the boxes of `python train.py --help`; `Config` inherits from all of them, so code reads
`cfg.lr`, not `cfg.optimization.lr`.
"""

import importlib.util
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from algorithms.options import KL, GrpoOptions, Level, PpoOptions, ReinforceOptions
from core import diagnostics, tasks
from core.types import UsageError


@dataclass(frozen=True)
class ModelOptions:
    """Model."""

    model_id: str = "tiny"
    """Hub id or folder; tiny: a Qwen3 of 0.8M random weights, drawn from --seed."""
    trust_remote_code: bool = False
    """Run the Python code that comes with --model-id; only if you trust its author."""
    lora_rank: int = 0
    """Rank of LoRA adapters on all linear layers; 0: train all weights."""
    lora_alpha: float = 0.0
    """LoRA scaling: adapters are multiplied by alpha / rank; 0: alpha is twice the rank."""
    max_model_len: int | None = None
    """Tokens of an episode, prompt and completions; None: max_turns * max_tokens + 4096."""


@dataclass(frozen=True)
class TaskOptions:
    """Task."""

    env: tuple[str, ...] = ("letter_counting",)
    """Environment, name[:key=value,...]; several are mixed evenly."""
    eval_env: tuple[str, ...] = ()
    """Environments to evaluate on; none given: those of --env."""
    train_difficulty: int = 0
    """Sets the option difficulty, level, n_hops or length of --env; 0: leave it as it is."""
    curriculum: float = 0.0
    """Raise the difficulty when training accuracy exceeds this, lower it below half of it;
    0: off."""
    max_turns: int = 8
    """Turns after which an episode is truncated."""
    env_timeout: float = 60.0
    """Seconds that one call of an environment may take before its episode fails; 0: no limit."""
    thinking: Literal["keep", "drop"] = "keep"
    """drop: remove <think> text of earlier turns from the context."""


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling."""

    num_prompts: int = 16
    """P, number of tasks per update."""
    group_size: int = 8
    """G, number of rollouts per task."""
    temperature: float = 1.0
    """Sampling temperature in training; evaluation is greedy."""
    top_p: float = 1.0
    """Nucleus sampling: keep the most likely tokens up to this probability mass; 1: keep all."""
    top_k: int = 0
    """Keep this many of the most likely tokens; 0: keep all."""
    max_tokens: int | None = None
    """Token limit of one completion; None: 64 for tiny, 1024 otherwise."""
    filter_groups: int = 0
    """Rounds in which groups with equal returns are replaced by new tasks (DAPO); 0: off."""
    sampler: Literal["auto", "torch", "vllm", "openai"] = "auto"
    """auto: vllm on a CUDA GPU if it is installed, otherwise torch; openai: evaluation only."""
    base_url: str = ""
    """URL of the server that --sampler openai evaluates."""
    gpu_memory_utilization: float = 0.9
    """Maximum share of GPU memory in use while vLLM samples."""


@dataclass(frozen=True)
class OptimizationOptions:
    """Optimization."""

    algo: Literal["reinforce", "grpo", "ppo", "scratch"] = "grpo"
    """scratch: the functions of your scratch.py."""
    num_updates: int = 50
    """Number of RL updates; 0: only the warm start and the evaluation."""
    num_epochs: int = 1
    """Passes over the rollouts of each update."""
    num_minibatches: int = 1
    """Gradient steps per epoch; each uses a random part of the rollouts."""
    lr: float | None = None
    """Learning rate; None: 1e-4 for tiny, 2e-5 with LoRA, 1e-6 otherwise."""
    max_grad_norm: float = 1.0
    """Clip the gradient to this norm; 0: no clipping."""
    max_tokens_per_micro_batch: int | None = None
    """Tokens in one forward and backward pass; None: 2048 for tiny, otherwise what fits."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Recompute activations in the backward pass; auto: only if memory requires it."""


@dataclass(frozen=True)
class AlgorithmOptions:
    """Algorithm options."""

    gamma: float = 1.0
    """Discount factor per turn."""
    credit: Literal["episode", "turn"] | None = None
    """episode: every turn is credited with the whole return; turn: with the rewards from that turn
    on; None: turn for ppo, otherwise episode."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus; 0: off."""
    kl_coef: float = 0.0
    """Coefficient of the KL penalty to the reference policy; 0: off."""
    kl_estimator: KL = "k2"
    """KL estimator; k2 in the loss and k1 in the reward have the gradient of the KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL penalty to the loss, or subtract it from the reward."""
    tis_cap: float = 2.0
    """Cap of the importance weights between sampler and trainer; 0: no importance weights."""
    tis_level: Level = "token"
    """token: one importance weight per token; sequence: the geometric mean of a sequence."""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """truncate: cap the importance weights; mask: zero weight outside [1/cap, cap]."""
    overlong_buffer: int = 0
    """Tokens before --max-tokens over which a length penalty grows from 0 to 1 (DAPO); 0: off."""
    mask_truncated_completions: bool = False
    """Exclude completions that hit --max-tokens from the loss."""
    sft_best: int = 0
    """Keep this many best rollouts, one per task, and take an SFT step on them after each update;
    0: off."""


@dataclass(frozen=True)
class WarmStartOptions:
    """Warm start."""

    sft_steps: int | None = None
    """SFT steps on demonstrations before RL; None: 800 for tiny, otherwise 0."""
    sft_batch_size: int = 32
    """Demonstrations per SFT step."""
    sft_hasty: float = 0.6
    """Fraction of demonstrations that are hasty guesses; the others are worked out."""
    sft_lr: float | None = None
    """Peak learning rate of SFT; None: 2e-3 for tiny, 1e-4 with LoRA, 1e-5 otherwise."""
    cache: bool = True
    """Reuse the cached warm start of tiny with the same settings; --no-cache: train it again."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation."""

    eval_every: int = 10
    """Updates between evaluations; 0: only before the first and after the last update."""
    eval_num_tasks: int = 256
    """Number of held-out tasks per environment, the same in every evaluation; 0: never evaluate."""


@dataclass(frozen=True)
class SystemOptions:
    """System."""

    device: str = "auto"
    """cpu, cuda, cuda:N or mps; auto: CUDA, then MPS, then the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; auto: bfloat16 on CUDA, otherwise float32."""
    seed: int = 0
    """Random seed; the same command with the same seed repeats the run."""


@dataclass(frozen=True)
class LoggingOptions:
    """Logging and checkpoints."""

    run_name: str = ""
    """Folder under runs/; empty: <algo>-<env>-<number>."""
    config: str = ""
    """Read settings from this config.yaml; flags override them."""
    resume: str = ""
    """Resume this run folder from its last checkpoint; --num-updates, .. may change."""
    save_every: int = 20
    """Updates between checkpoints; 0: only at the end."""
    stop_on: tuple[str, ...] = ()
    """Warnings on which to save and stop the run; any: on every warning."""
    microscope: int = 4096
    """Sampled tokens per update that report.html shows one by one; 0: none."""
    track: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    """Also send the metrics to this tracker."""


@dataclass(frozen=True)
class Config(
    LoggingOptions, SystemOptions, EvaluationOptions, WarmStartOptions, AlgorithmOptions,
    OptimizationOptions, SamplingOptions, TaskOptions, ModelOptions,
):  # fmt: skip
    """picoRL: reinforcement learning for language models."""

    reinforce: ReinforceOptions = field(default_factory=ReinforceOptions)
    grpo: GrpoOptions = field(default_factory=GrpoOptions)
    ppo: PpoOptions = field(default_factory=PpoOptions)


POSITIVE = """num_prompts group_size num_epochs num_minibatches lr temperature max_tokens max_turns
    max_tokens_per_micro_batch max_model_len sft_batch_size sft_lr top_p
    gpu_memory_utilization""".split()
NOT_NEGATIVE = """num_updates max_grad_norm tis_cap lora_rank lora_alpha sft_steps seed
    train_difficulty eval_every eval_num_tasks save_every top_k entropy_coef kl_coef filter_groups
    overlong_buffer sft_best microscope env_timeout""".split()
NOT_SCRATCH = """num_epochs num_minibatches max_grad_norm mask_truncated_completions gamma credit
    entropy_coef     kl_coef tis_cap tis_mode tis_level overlong_buffer top_p top_k dtype sampler
    gradient_checkpointing""".split()
SHARES = "sft_hasty top_p gpu_memory_utilization gamma curriculum".split()
LARGEST_SEED = 2**32 - 1
LONGEST_NAME = 100  # bytes of a run's name; a file system takes 255


def resolve(cfg: Config) -> Config:
    """Fill in what was left to the kind of model and algorithm."""
    tiny, lora = cfg.model_id == "tiny", cfg.lora_rank > 0
    defaults: dict[str, Any] = {
        "lr": 1e-4 if tiny else 2e-5 if lora else 1e-6,
        "sft_lr": 2e-3 if tiny else 1e-4 if lora else 1e-5,
        "sft_steps": 800 if tiny and cfg.sampler != "openai" else 0,
        "max_tokens": 64 if tiny else 1024,
        "max_tokens_per_micro_batch": 2048 if tiny else None,
        "credit": "turn" if cfg.algo == "ppo" else "episode",
    }
    cfg = replace(cfg, **{k: v for k, v in defaults.items() if getattr(cfg, k) is None})
    if cfg.algo == "scratch" and cfg.dtype == "auto":
        cfg = replace(cfg, dtype="float32")
    longest = cfg.max_turns * cfg.max_tokens + 4096  # what is written, and what is read
    return replace(cfg, max_model_len=longest) if cfg.max_model_len is None else cfg


def check(cfg: Config, algorithms: dict[str, Any]) -> None:
    """Raise UsageError for the first setting that can't be meant."""
    _check_texts(cfg)
    _check_ranges(cfg)
    _check_unused(cfg, algorithms)
    known = [*diagnostics.WARNINGS, "any"]
    if wrong := [name for name in cfg.stop_on if name not in known]:
        raise UsageError(f"--stop-on {wrong[0]}: no such warning; there are {', '.join(known)}")
    if (compares(cfg) or cfg.filter_groups) and cfg.group_size < 2:
        raise UsageError("--group-size 1 has nothing to compare a rollout with; take 2 or more")
    if cfg.algo == "ppo" and cfg.credit == "episode":
        raise UsageError("--credit episode: PPO credits each token by its values; leave it out")
    if cfg.num_minibatches > (rollouts := cfg.num_prompts * cfg.group_size):
        raise UsageError(f"--num-minibatches {cfg.num_minibatches}: an update has {rollouts} "
                         "rollouts, one for each at most")  # fmt: skip
    if cfg.overlong_buffer > cfg.max_tokens:
        raise UsageError(f"--overlong-buffer is at most --max-tokens, {cfg.max_tokens}")
    if 0 < cfg.tis_cap < 1:
        raise UsageError(f"--tis-cap is 1 or more, or 0 for no weights, not {cfg.tis_cap}")
    if cfg.kl_coef and cfg.kl_estimator == "k1" and cfg.kl_in == "loss":
        raise UsageError("--kl-estimator k1 in the loss has a gradient of mean 0; "
                         "take k2, or --kl-in reward")  # fmt: skip
    if cfg.sampler == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UsageError('--sampler vllm: not installed; pip install -e ".[vllm]"')
    if cfg.sampler == "openai" and (cfg.num_updates or cfg.sft_steps or not cfg.base_url):
        raise UsageError("--sampler openai evaluates only: --num-updates 0 --base-url http://..")
    if cfg.sampler == "openai":
        _check_address(cfg.base_url)
    if cfg.max_model_len <= cfg.max_tokens:
        raise UsageError(f"--max-model-len {cfg.max_model_len} leaves no room for a prompt beside "
                         f"--max-tokens {cfg.max_tokens}")  # fmt: skip
    if cfg.track != "none" and importlib.util.find_spec(cfg.track) is None:
        raise UsageError(f'--track {cfg.track}: not installed; pip install -e ".[track]"')


def compares(cfg: Config) -> bool:
    """Whether rollouts are compared within their group."""
    by_group = cfg.algo == "reinforce" and cfg.reinforce.baseline in ("group", "leave_one_out")
    return by_group or cfg.algo in ("grpo", "scratch")


def _check_texts(cfg: Config) -> None:
    if not cfg.env:
        raise UsageError("--env names no environment")
    for flag in ("model_id", "device"):
        if not getattr(cfg, flag):
            raise UsageError(f"--{flag.replace('_', '-')} is empty")
    for option in fields(cfg):
        value = getattr(cfg, option.name)
        for text in value if isinstance(value, tuple) else [value]:
            if isinstance(text, str) and not text.isprintable():
                flag = option.name.replace("_", "-")
                raise UsageError(f"--{flag} has characters that can't be shown: {text!a}")
    if cfg.run_name != cfg.run_name.strip():
        raise UsageError(f"--run-name {cfg.run_name!r} begins or ends with a space")
    if len(cfg.run_name.encode()) > LONGEST_NAME:
        raise UsageError(f"--run-name is at most {LONGEST_NAME} bytes long")


def _check_ranges(cfg: Config) -> None:
    for name in POSITIVE + NOT_NEGATIVE:
        _check_number(f"--{name}", getattr(cfg, name), positive=name in POSITIVE)
    for name in SHARES:
        if not 0 <= (value := getattr(cfg, name)) <= 1:
            raise UsageError(f"--{name.replace('_', '-')} is a share from 0 to 1, not {value}")
    if cfg.seed > LARGEST_SEED:
        raise UsageError(f"--seed is at most {LARGEST_SEED}, not {cfg.seed}")
    for option in fields(getattr(cfg, cfg.algo)) if cfg.algo != "scratch" else ():
        value = getattr(getattr(cfg, cfg.algo), option.name)
        if type(value) in (int, float):
            _check_number(f"--{cfg.algo}.{option.name}", value)
    if cfg.algo == "grpo" and 0 < cfg.grpo.dual_clip <= 1:
        raise UsageError(f"--grpo.dual-clip is above 1, or 0 for none, not {cfg.grpo.dual_clip}")
    if cfg.algo == "grpo" and cfg.grpo.dual_clip and cfg.grpo.surrogate == "cispo":
        raise UsageError("--grpo.dual-clip has no effect with the surrogate cispo")
    if cfg.algo == "ppo" and cfg.ppo.gae_lambda > 1:
        raise UsageError(f"--ppo.gae-lambda is a share from 0 to 1, not {cfg.ppo.gae_lambda}")


def _check_number(flag: str, value: float | None, positive: bool = False) -> None:
    if value is None:  # as the model and the machine have it
        return
    if not math.isfinite(value) or value < 0 or (value == 0 and positive):
        what = "more than 0" if positive else "0 or more"
        raise UsageError(f"{flag.replace('_', '-')} must be {what}, not {value}")


def _check_unused(cfg: Config, algorithms: dict[str, Any]) -> None:
    for name in algorithms:
        options = getattr(cfg, name)
        if name != cfg.algo and options != type(options)():
            raise UsageError(f"--{name}.* options have no effect with --algo {cfg.algo}")
    defaults = {option.name: option.default for option in fields(cfg)}
    for name in NOT_SCRATCH if cfg.algo == "scratch" else ():
        meant = {"credit": "episode", "dtype": "float32"}.get(name, defaults[name])
        if getattr(cfg, name) not in (meant, "torch"):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} has no effect with --algo scratch: it does as you wrote it")
    needs = {"kl_estimator": "kl_coef", "kl_in": "kl_coef", "tis_level": "tis_cap",
             "tis_mode": "tis_cap", "base_url": "sampler", "lora_alpha": "lora_rank",
             "eval_env": "eval_num_tasks"}  # fmt: skip
    for name, other in needs.items():
        off = cfg.sampler != "openai" if other == "sampler" else getattr(cfg, other) == 0
        if off and getattr(cfg, name) != defaults[name]:
            flag, condition = name.replace("_", "-"), other.replace("_", "-")
            hint = " openai" if other == "sampler" else ""
            raise UsageError(f"--{flag} has no effect without --{condition}{hint}")
    for name in ("train_difficulty", "curriculum"):
        if getattr(cfg, name) and not any(map(tasks.difficulty_key, cfg.env)):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} has no effect: no environment of --env can be made harder")


def _check_address(url: str) -> None:
    """UsageError for what is no address, or may hold a secret, which no message repeats."""
    if set("@?#") & set(url):
        raise UsageError("--base-url takes no user, password or query: config.yaml would keep it; "
                         "a key goes into the environment variable OPENAI_API_KEY")  # fmt: skip
    try:
        parts = urlsplit(url)
        fit = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        fit = False
    if not fit:
        raise UsageError(f"--base-url is like http://127.0.0.1:8000/v1, not {url!r}")


def remarks(cfg: Config) -> list[str]:
    """What a person should know of the settings that are meant so."""
    told = []
    if cfg.algo == "grpo":
        chosen = (f"{f.name}={getattr(cfg.grpo, f.name)}" for f in fields(cfg.grpo))
        told.append(f"grpo: {' '.join(chosen)}")
    if cfg.top_p < 1 or cfg.top_k > 0:
        told.append("with --top-p or --top-k the sampler's log-probs are renormalised over the "
                    "tokens left, the trainer's are not: expect a gap")  # fmt: skip
    if cfg.kl_coef and cfg.lora_rank and cfg.sft_steps:
        told.append("--kl-coef holds on to the model without its adapters: the warm start, which "
                    "is in the adapters, counts as distance from it")  # fmt: skip
    return told
