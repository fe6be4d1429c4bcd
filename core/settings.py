"""What the settings mean together: defaults that depend on the model, and what can't be meant."""

import importlib.util
import math
from dataclasses import fields, replace
from typing import Any
from urllib.parse import urlsplit

from core import alarms, tasks
from core.types import UsageError

POSITIVE = """num_prompts group_size num_epochs num_minibatches lr temperature max_tokens max_turns
    max_tokens_per_micro_batch max_model_len sft_batch_size sft_lr top_p
    gpu_memory_utilization""".split()
NOT_NEGATIVE = """num_updates max_grad_norm tis_cap lora_rank lora_alpha sft_steps seed
    train_difficulty eval_every eval_num_tasks save_every top_k entropy_coef kl_coef filter_groups
    overlong_buffer sft_best microscope env_timeout""".split()
NOT_SCRATCH = """num_epochs num_minibatches max_grad_norm mask_truncated gamma credit entropy_coef
    kl_coef tis_cap tis_mode tis_level overlong_buffer top_p top_k dtype sampler
    gradient_checkpointing""".split()
SHARES = "sft_hasty top_p gpu_memory_utilization gamma curriculum".split()
LARGEST_SEED = 2**32 - 1
LONGEST_NAME = 100  # bytes of a run's name; a file system takes 255


def resolve(cfg: Any) -> Any:
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


def check(cfg: Any, algorithms: dict[str, Any]) -> None:
    """Raise UsageError for the first setting that can't be meant."""
    _check_texts(cfg)
    _check_ranges(cfg)
    _check_unused(cfg, algorithms)
    known = [*alarms.ALARMS, "any"]
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


def compares(cfg: Any) -> bool:
    """Whether rollouts are compared within their group."""
    by_group = cfg.algo == "reinforce" and cfg.reinforce.baseline in ("group", "leave_one_out")
    return by_group or cfg.algo in ("grpo", "scratch")


def _check_texts(cfg: Any) -> None:
    if not cfg.env:
        raise UsageError("--env names no environment")
    for flag in ("model_id", "device"):
        if not getattr(cfg, flag):
            raise UsageError(f"--{flag.replace('_', '-')} is empty")
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        for text in value if isinstance(value, tuple) else [value]:
            if isinstance(text, str) and not text.isprintable():
                flag = field.name.replace("_", "-")
                raise UsageError(f"--{flag} has characters that can't be shown: {text!a}")
    if cfg.run_name != cfg.run_name.strip():
        raise UsageError(f"--run-name {cfg.run_name!r} begins or ends with a space")
    if len(cfg.run_name.encode()) > LONGEST_NAME:
        raise UsageError(f"--run-name is at most {LONGEST_NAME} bytes long")


def _check_ranges(cfg: Any) -> None:
    for name in POSITIVE + NOT_NEGATIVE:
        _check_number(f"--{name}", getattr(cfg, name), positive=name in POSITIVE)
    for name in SHARES:
        if not 0 <= (value := getattr(cfg, name)) <= 1:
            raise UsageError(f"--{name.replace('_', '-')} is a share from 0 to 1, not {value}")
    if cfg.seed > LARGEST_SEED:
        raise UsageError(f"--seed is at most {LARGEST_SEED}, not {cfg.seed}")
    for field in fields(getattr(cfg, cfg.algo)) if cfg.algo != "scratch" else ():
        value = getattr(getattr(cfg, cfg.algo), field.name)
        if type(value) in (int, float):
            _check_number(f"--{cfg.algo}.{field.name}", value)
    if cfg.algo == "grpo" and 0 < cfg.grpo.dual_clip <= 1:
        raise UsageError(f"--grpo.dual-clip is above 1, or 0 for none, not {cfg.grpo.dual_clip}")
    if cfg.algo == "grpo" and cfg.grpo.dual_clip and cfg.grpo.surrogate == "cispo":
        raise UsageError("--grpo.dual-clip has no effect with the surrogate cispo")
    if cfg.algo == "ppo" and cfg.ppo.lam > 1:
        raise UsageError(f"--ppo.lam is a share from 0 to 1, not {cfg.ppo.lam}")


def _check_number(flag: str, value: float | None, positive: bool = False) -> None:
    if value is None:  # as the model and the machine have it
        return
    if not math.isfinite(value) or value < 0 or (value == 0 and positive):
        what = "more than 0" if positive else "0 or more"
        raise UsageError(f"{flag.replace('_', '-')} must be {what}, not {value}")


def _check_unused(cfg: Any, algorithms: dict[str, Any]) -> None:
    for name in algorithms:
        options = getattr(cfg, name)
        if name != cfg.algo and options != type(options)():
            raise UsageError(f"--{name}.* options have no effect with --algo {cfg.algo}")
    defaults = {field.name: field.default for field in fields(cfg)}
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


def remarks(cfg: Any) -> list[str]:
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
