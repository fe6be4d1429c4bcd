"""Load a policy: a Hub id or the folder of a model.

    policy = load_policy(Config(model_id="Qwen/Qwen3-0.6B", lora_rank=32))

Only safetensors weights are read. Python code that comes with a model runs only with
--trust-remote-code; otherwise transformers' own implementation of the model type is used, if it has
one. Weights have the given dtype; LoRA adapters and the value head are always float32.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging
from transformers.utils.peft_utils import find_adapter_config_file

from core.chat_template import PLAIN, check_template, set_template_options
from core.config import RUNS, Config, parse_template_options
from core.faults import UsageError
from core.kv_cache import prefill
from core.policy import Policy
from core.prefix_sharing import ATTENTION, make_tree
from environments.plumbing.text import one_line

# nats; two paths round differently: SmolLM2-135M by 1e-4 in float32 on some processors
MAX_GAP, MAX_GAP_16_BIT = 1e-3, 0.1
NEVER = -30.0  # log-prob of a token that is not sampled, ever
ADAPTER_CONFIG = "adapter_config.json"
HUB_ID = r"\w[\w.-]*(/[\w.-]+)?"
PROBE_TEXT = "Once upon a time, 1 + 1 = 2."
LOADING = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}

logging.disable_progress_bar()  # of weight loading, which would break the display; not of downloads
# cuDNN's attention makes a plan for each new shape, and micro-batches differ in shape: a step of a
# small model on an H200 took 0.15 to 3 s, and 0.08 s without it (runs/benchmarks)
torch.backends.cuda.enable_cudnn_sdp(False)


def load_policy(
    cfg: Config,
    model_id: str = "",
    *,
    adapters: str = "",
    value_head: bool = False,
    plain: bool = False,
    flag: str = "--model-id",
) -> Policy:
    """Loads `model_id`, a Hub id or a folder, by default that of `cfg`, with the settings of `cfg`.

    From a folder of LoRA adapters, such as the `model/` of a run, loads their base model and the
    adapters, which are trained on, without their dropout; or, in place of these, the adapters in
    the folder `adapters`. `plain`: a model without a chat template gets one that adds nothing, as
    all prompts are raw. core/files/models.py has the models with names, such as tiny. Raises
    UsageError, in one line that names `flag`.
    """
    model_id = model_id or cfg.model_id
    device = pick_device(cfg.device)
    subject = f"{flag} {model_id}"
    _check_folder(model_id, subject)
    if has_adapters(model_id):
        adapters = adapters or model_id
        model_id = _base_of(cfg, model_id, subject, train=flag == "--model-id")
        subject += f": its base {model_id} ({ADAPTER_CONFIG})"
        _check_folder(model_id, subject)
    adapted = cfg.lora_rank > 0 or adapters
    trains = flag == "--model-id" and cfg.num_updates + cfg.sft_steps > 0
    base, tokenizer = _load_files(cfg, model_id, device, subject, trains and not adapted)
    torch.manual_seed(cfg.seed)
    model: Any = _with_adapters(base, cfg.lora_rank, adapters) if adapted else base
    model.to(device).eval()  # without the dropout of adapters that were trained elsewhere
    with _one_line_errors(subject):
        if plain and not tokenizer.chat_template:
            tokenizer.chat_template = PLAIN
        set_template_options(tokenizer, parse_template_options(cfg.template_options))
        embeddings = cast(nn.Embedding, base.get_input_embeddings()).weight
        closing_id = check_template(tokenizer, len(embeddings))
    config = base.config.get_text_config()
    limit, limited_by = _context_limit(config, subject)
    max_length = cfg.max_model_len or limit
    policy = Policy(
        model=model,
        tokenizer=tokenizer,
        device=device,
        stop_ids=_stop_ids(base, tokenizer, closing_id),
        end_of_turn_id=closing_id,
        max_length=min(limit, max_length),
        limited_by="--max-model-len" if max_length <= limit else limited_by,
        value_head=_zero_head(config.hidden_size, device) if value_head else None,
        trust_remote_code=cfg.trust_remote_code,
    )
    if reason := _share_prefixes(subject, policy):
        policy.remarks.append(f"computing each prompt once per completion, as {reason}")
    return policy


def has_adapters(folder: str) -> bool:
    """Whether the folder has LoRA adapters: then these are loaded, and the base that they name."""
    return Path(folder, ADAPTER_CONFIG).exists()


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto": CUDA, else MPS, else CPU. Raises UsageError if invalid."""
    if name == "auto":
        on_mac = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if on_mac else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        choices = "auto, cpu, cuda, cuda:N or mps"
        raise UsageError(f"--device {name}: this machine lacks it; take {choices}") from error
    return torch.device(name)


def _check_folder(model_id: str, subject: str) -> None:
    """Raises UsageError for a path that is neither a Hub id nor the folder of a model."""
    folder = Path(model_id)
    files = [*folder.iterdir()] if folder.is_dir() else []
    suffixes = {file.suffix for file in [folder, *files]}
    small = [file for file in files if file.is_file() and file.stat().st_size < 1000]
    pointers = [f.name for f in small if f.read_bytes().startswith(b"version https://git-lfs")]
    if pointers:
        reason = f"{min(pointers)} is a pointer of Git LFS: run git lfs pull there"
    elif has_adapters(model_id) or (folder / "config.json").exists():
        if ".bin" not in suffixes or ".safetensors" in suffixes or has_adapters(model_id):
            return
        reason = "weights in .bin are not read: save them again, with save_pretrained"
    elif ".gguf" in suffixes:
        reason = "GGUF is not read: take the model's safetensors"
    elif snapshots := [*folder.glob("snapshots/*")]:
        reason = f"a folder of the cache: take {snapshots[0]}, or the model's Hub id"
    elif folder.exists() or RUNS in folder.parents or not re.fullmatch(HUB_ID, model_id):
        reason = "no model in this folder (no config.json), and no Hub id, such as Qwen/Qwen3-0.6B"
        reason += "; a run's is runs/NAME/model"
    else:
        return
    raise UsageError(f"{subject}: {reason}")


def _load_files(
    cfg: Config, model_id: str, device: torch.device, subject: str, trains_all: bool
) -> tuple[PreTrainedModel, Tokenizer]:
    source = {"trust_remote_code": cfg.trust_remote_code}
    dtype: str = cfg.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    from_pretrained: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    if cfg.quantize == "nf4":
        from core.quantize import load_in_4_bits

        from_pretrained = partial(load_in_4_bits, device=device)
    with _one_line_errors(f"{subject}: can't be loaded", cfg.trust_remote_code):
        if not cfg.trust_remote_code and "auto_map" in get_tokenizer_config(model_id):
            # transformers would fall back to another tokenizer, with other ids, without a warning
            raise ValueError("trust_remote_code")
        if find_adapter_config_file(model_id):
            raise ValueError("it is LoRA adapters: download them to a folder, and give that")
        config = AutoConfig.from_pretrained(model_id, **source)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
            raise ValueError(f"{config.model_type} is not a language model of text alone")
        tokenizer = AutoTokenizer.from_pretrained(model_id, **source)
        if not tokenizer.encode(PROBE_TEXT, add_special_tokens=False):
            raise ValueError("it has no tokenizer: add tokenizer.json and tokenizer_config.json")
        config._attn_implementation = None  # of the trainer that saved it
        saved = getattr(config, "quantization_config", None)
        if saved and trains_all:
            raise ValueError("its weights are quantized: give --lora-rank 16")
        if saved and cfg.quantize == "nf4" and not saved.get("load_in_4bit"):
            raise ValueError("its weights are quantized in another way: leave out --quantize")
        model, report = from_pretrained(
            model_id, config=config, dtype=getattr(torch, dtype), **source, **LOADING
        )
    # transformers has put random weights in their place
    invalid = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if invalid:
        reason = f"{len(invalid)} of its weights are missing or have another shape"
        raise UsageError(f"{subject}: {reason}, such as {min(invalid)}")
    model.config.use_cache = False  # in training; sampling passes its own cache
    model.config.output_attentions = False  # sdpa has none, and would refuse to be exported
    model.config.return_dict = True
    return model, tokenizer


@torch.no_grad()
def _share_prefixes(subject: str, policy: Policy) -> str:
    """Makes `policy` compute a shared prefix once, or returns why the numbers would differ.

    Compares log-probs in training and in sampling with those of separate sequences. Raises
    UsageError if these differ from what the model's plain forward returns.
    """
    model, config = policy.causal_lm, policy.causal_lm.config.get_text_config()
    ids = policy.tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    prompts, prompt_of = [ids, ids[:5]], [0, 0, 1]
    completions = [ids[:3], ids[3:9], ids[:4]]
    whole = [prompts[i] + end for i, end in zip(prompt_of, completions, strict=True)] + [ids[2:9]]
    padded = pad_sequence([torch.tensor(ids) for ids in whole], batch_first=True).to(policy.device)
    rows = torch.tensor([i for i, ids in enumerate(whole) for _ in ids])  # of the n tokens
    columns = torch.tensor([i for ids in whole for i in range(len(ids))])
    with _one_line_errors(subject):
        plain = model(input_ids=padded, use_cache=False).logits[rows, columns].float()
        separate = policy.to_logits(policy.hidden_states(padded)[rows, columns])  # [n, V]
    if not plain.isfinite().all():
        raise UsageError(f"{subject}: its logits are not finite")
    exact = policy.dtype.itemsize >= 4
    limit = MAX_GAP if exact else MAX_GAP_16_BIT
    gap = _gaps(separate, plain).max().item()
    if not gap < limit:
        reason = f"log-probs in training would be up to {gap:.2g} nats off the model's"
        raise UsageError(f"{subject}: this kind of model is not supported: {reason}")
    if model._auto_class is not None or config._attn_implementation != "sdpa":
        return "its attention is not transformers' sdpa"
    if (window := _window(config)) < policy.max_length:
        return f"its attention window of {window} tokens is shorter than its context"
    try:
        with _one_line_errors(""):  # silences warnings
            model.set_attn_implementation(ATTENTION)
            tree = make_tree(whole).to(policy.device)
            shared = policy.hidden_states(padded, tree)[0, tree.nodes[rows, columns]]
            cache = prefill(policy, prompts, max_new_tokens=1)
            cache.select(torch.tensor(prompt_of, device=policy.device))
            first_ids = [completion[0] for completion in completions]
            cache.append(torch.tensor(first_ids, device=policy.device))
        ends = [len(prompts[i]) for i in prompt_of]  # where in `whole` the appended tokens are
        sampled = [separate[(rows == i) & (columns == end)] for i, end in enumerate(ends)]
        gaps = [_gaps(policy.to_logits(shared), separate), _gaps(cache.logits, torch.cat(sampled))]
        # the largest gap of a token, or in 16 bits, which round each token, their mean
        gap = max((gap.max() if exact else gap.mean()).item() for gap in gaps)
        reason = "" if gap < limit else f"log-probs would be {gap:.1g} nats off"
    except UsageError:  # of layers that do not take `tree`
        reason = "its layers do not take shared prefixes"
    if reason:
        model.set_attn_implementation("sdpa")
    return reason


def _context_limit(config: Any, subject: str) -> tuple[int, str]:
    """How many tokens a sequence of the model may have, and what in its config.json says so.

    YaRN multiplies the original limit, which some files repeat as max_position_embeddings. With
    longrope, above the original limit, the longest sequence of a batch would change the factors,
    and so the log-probs, of all others.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        reason = "its config.json has no max_position_embeddings"
        raise UsageError(f"{subject}: this kind of model is not supported: {reason}")
    limited_by = "config.json's max_position_embeddings"
    original_name = "original_max_position_embeddings"
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *ropes.values()]:  # of the model, or of each kind of layer
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        original = kind and (rope.get(original_name) or getattr(config, original_name, None))
        if original and kind == "yarn":
            limit = max(limit, int(original * (rope.get("factor") or 1)))
        elif original and kind == "longrope" and original < limit:
            limit, limited_by = original, f"longrope's {original_name} in config.json"
    return limit, limited_by


def _zero_head(width: int, device: torch.device) -> nn.Linear:
    head = nn.Linear(width, 1, device=device, dtype=torch.float32)
    nn.init.zeros_(head.weight)  # the first value estimates are 0 instead of noise
    nn.init.zeros_(head.bias)
    return head


def _window(config: Any) -> float:
    """The smallest attention window of a layer, in tokens; infinite without windows."""
    if set(getattr(config, "layer_types", None) or ["?"]) == {"full_attention"}:
        return math.inf
    names = [n for n in vars(config) if n.endswith(("window", "window_size", "chunk_size"))]
    return min([getattr(config, n) for n in names if type(getattr(config, n)) is int] + [math.inf])


def _gaps(logits: Tensor, expected: Tensor) -> Tensor:
    """Absolute differences of log-probs, of tokens above NEVER: others round by more."""
    expected_logprobs = expected.float().log_softmax(-1)
    differences = logits.float().log_softmax(-1) - expected_logprobs
    return differences[expected_logprobs > NEVER].abs()


@contextmanager
def _one_line_errors(subject: str, trusted: bool = True) -> Iterator[None]:
    """Turns every exception into a UsageError of one line, and silences warnings."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:
        name = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        reason = name + one_line(error)[:200]
        if not trusted and "trust_remote_code" in str(error):
            reason = "it needs its own Python code; add --trust-remote-code if you trust its author"
        raise UsageError(f"{subject}: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)


def _base_of(cfg: Config, folder: str, subject: str, train: bool) -> str:
    """The model of which `folder` has the LoRA adapters.

    Raises UsageError if they cannot be read or, to `train` them, have another rank.
    """
    from peft import LoraConfig, PeftConfig  # takes a second

    with _one_line_errors(f"{subject}: can't be loaded"):
        saved: Any = PeftConfig.from_pretrained(folder)
        base = saved.base_model_name_or_path
        if not isinstance(saved, LoraConfig) or not base:
            kind = f"adapters of the kind {saved.peft_type.value} for the base model {base}"
            raise ValueError(f"{kind}: picoRL reads LoRA that names its base in {ADAPTER_CONFIG}")
        if "pissa_niter" in str(saved.init_lora_weights):
            hint = "save the adapters with path_initial_model_for_weight_conversion"
            raise ValueError(f"its base was changed at random (pissa_niter): {hint}")
    if train and cfg.lora_rank != saved.r:
        raise UsageError(f"{subject}: has LoRA adapters: to train them, give --lora-rank {saved.r}")
    copy = Path(folder).parent / "base"
    is_tiny = Path(base).name == "base" and copy.is_dir()  # in a run that may have moved
    return str(copy) if is_tiny else base


def _with_adapters(model: PreTrainedModel, rank: int, folder: str) -> Any:
    """The model with new adapters, or with those in `folder`."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict  # takes a second
    from peft.utils import load_peft_weights

    if Path(str(model.name_or_path)).is_dir():  # PEFT saves it, and may open it from elsewhere
        model.name_or_path = str(Path(str(model.name_or_path)).absolute())
    if not folder:
        config = LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"
        )
        with _one_line_errors(f"--lora-rank {rank}"):
            return get_peft_model(model, config)
    with _one_line_errors(f"{folder}: can't be loaded"):
        config = LoraConfig.from_pretrained(folder)
        config.inference_mode = False  # saved as True, with which nothing is trained
        adapted = get_peft_model(model, config)
        weights = load_peft_weights(folder, device="cpu")
        loaded: Any = set_peft_model_state_dict(adapted, weights)
        missing = [key for key in loaded.missing_keys if "lora_" in key]
        unpaired = [*loaded.unexpected_keys, *missing]
        if unpaired:
            reason = f"{len(unpaired)} weights, such as {unpaired[0]}, have no counterpart"
            raise ValueError(f"they are of another model than {model.name_or_path}: {reason}")
    return adapted


def _stop_ids(model: PreTrainedModel, tokenizer: Tokenizer, closing_id: int) -> list[int]:
    """All ids that end a completion: of both configs, tokenizer and chat template; sorted."""
    ids = {tokenizer.eos_token_id, closing_id}
    for config in (model.generation_config, model.config.get_text_config()):
        listed = getattr(config, "eos_token_id", None)
        ids |= {*listed} if isinstance(listed, list) else {listed}
    return sorted(ids - {None})
