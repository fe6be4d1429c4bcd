"""An evening on NanoLLM. A vLLM engine that samples from the training model's own weights.

    pip install -e ".[vllm]"
    python train.py --sampler vllm

core/weight_sharing.py lays out the weights once for both models, before vLLM captures CUDA graphs.
So after `optimizer.step()` vLLM has the new weights, and nothing is sent. Only LoRA adapters are
copied, into the engine's slots, when `with sampler:` is entered. They are never merged with the
base weights, which do not change.

On a GPU the KV cache is allocated only inside `with sampler:`; training can use its memory while
the engine sleeps. --quantize needs --sampler torch: vLLM cannot read bitsandbytes' 4-bit weights.

If an engine fails or its log-probs are wrong on a GPU, change one thing at a time:

    VLLM_USE_V2_MODEL_RUNNER=0      Model Runner V1, as on a CPU, instead of V2
    VLLM_LOGGING_LEVEL=INFO         shows which attention kernel vLLM takes

runs/benchmarks/gpu_check.py says in minutes what works on a GPU.
"""

import copy
import gc
import hashlib
import itertools
import os
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core import canary, patches, weight_sharing
from core.config import is_installed
from core.faults import UsageError
from core.policy import Policy
from core.sampler import (
    Request,
    Sampler,
    SamplingParams,
    TorchSampler,
    completion_limit,
    to_completion,
)
from core.seeds import derive_seed
from core.types import Completion

LORA_RANKS = [1, 8, 16, 32, 64, 128, 256]  # ranks that vLLM has slots for
# Settings of a model that are numbers of tokens; beyond them its attention computes differently
LIMITS = ("sliding_window", "original_max_position_embeddings")
CPU_CACHE_BYTES = 1 << 27  # smallest KV cache on a CPU
PLENTY = 1 << 50  # bytes of a KV cache that no model exceeds
CPU_BLOCK_SIZE = 32  # tokens; vLLM's default of 128 would not share shorter prompts
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in this process
    "VLLM_HOST_IP": "127.0.0.1",  # find no address of this machine by connecting to the network
    "VLLM_NO_USAGE_STATS": "1",  # send no telemetry
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles kernels at its first use
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}


def make_sampler(name: str, policy: Policy, *arguments: Any, **options: Any) -> Sampler:
    """Makes "torch", "vllm", or "auto": vllm on a GPU if it starts, otherwise torch.

    `arguments` and `options` are those of NanoLLM; "vllm" raises as NanoLLM does.
    """
    if name == "torch" or (name == "auto" and policy.device.type != "cuda"):
        return TorchSampler(policy)
    try:
        return NanoLLM(policy, *arguments, **options)
    except UsageError as error:
        if name != "auto":
            raise
        sampler = TorchSampler(policy)
        sampler.remark = f"sampling in plain PyTorch: {error}"
        return sampler


class NanoLLM(Sampler):
    """Samples with vLLM from the weights that are being trained."""

    def __init__(
        self,
        policy: Policy,
        gpu_memory_utilization: float = 0.9,
        reserved_bytes: int = 0,
        with_kept_ids: bool = False,
        num_rollouts: int = 0,
    ):
        """Starts the engine in this process, on the policy's device.

        Training and the engine together use at most `gpu_memory_utilization` of the GPU's memory,
        less `reserved_bytes` for what training has yet to allocate. `with_kept_ids`:
        `Completion.kept_ids` is what top-k and top-p kept. `num_rollouts`: most completions that
        will be sampled at the same time; 0: unknown. Raises UsageError if vLLM or memory is
        missing, the model cannot be shared, the engine does not start, or its log-probs are further
        from the trainer's than canary.MAX_GAP.
        """
        self.policy, self.with_kept_ids = policy, with_kept_ids
        self.engine: Any = None  # vllm.v1.engine.llm_engine.LLMEngine
        self.lora_request: Any = None
        self.slots: list[weight_sharing.AdapterSlot] = []
        self.running: dict[str, Request] = {}
        self.request_numbers = itertools.count()
        self.awake = True
        if policy.device.type == "cuda" and policy.dtype == torch.float32:
            # vLLM computes float32 attention with Triton, whose default rounds to TF32
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
        try:
            if obstacle := why_not_shareable(policy, with_kept_ids):
                raise UsageError(f"{obstacle}, or use --sampler torch")
            with preserve_process_state():
                self._start(gpu_memory_utilization, reserved_bytes, num_rollouts)
            self._compare()
        except Exception as error:
            self.close()
            if isinstance(error, UsageError):
                raise
            reason = f"{error}".strip().partition("\n")[0]
            raise UsageError(f"vLLM could not start: {reason}; use --sampler torch") from error
        self.__exit__()

    def add(self, request: Request) -> None:
        """As `Sampler.add`. Raises RuntimeError outside `with sampler:`."""
        if not self.awake:
            raise RuntimeError("NanoLLM samples only inside `with sampler:`")
        import vllm

        params = self._vllm_params(request.params, completion_limit(self.policy, request))
        params.seed = derive_seed(request.seed, request.stream)
        request_id = str(next(self.request_numbers))
        self.running[request_id] = request
        prompt = vllm.TokensPrompt(prompt_token_ids=request.prompt)
        self.engine.add_request(request_id, prompt, params, lora_request=self.lora_request)

    def step(self) -> list[tuple[Request, Completion]]:
        completions = []
        for request_output in self._step() if self.running else []:
            [output] = request_output.outputs
            kept_ids = output.sampling_mask.token_ids if self.with_kept_ids else None
            ids, logprobs = list(output.token_ids), list(output.logprobs.logprobs)
            request = self.running.pop(request_output.request_id)
            stop = request.params.stop  # the engine has no tokenizer: it samples on after these
            completion = to_completion(self.policy, ids, logprobs, kept_ids, stop)
            completions.append((request, completion))
        return completions

    def _step(self) -> list[Any]:
        """A step of the engine. vLLM for CPUs moves PyTorch's generator, and does not need it."""
        with torch.random.fork_rng([], enabled=self.policy.device.type == "cpu"):
            return self.engine.step()

    def clear(self) -> None:
        self.engine.abort_request(list(self.running))
        self.running.clear()

    def _vllm_params(self, params: SamplingParams, max_tokens: int) -> Any:
        """Returns vllm.SamplingParams."""
        import vllm

        # vLLM returns the kept ids only if it draws, with a top-k above 0
        if self.with_kept_ids and params.temperature == 0:
            params = replace(params, temperature=1.0, top_k=1)
        if self.with_kept_ids and params.top_k == 0:
            params = replace(params, top_k=self.policy.causal_lm.config.vocab_size)
        return vllm.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=max_tokens,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            stop_token_ids=self.policy.stop_ids,
            ignore_eos=True,  # stop_token_ids includes it
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def sync(self) -> None:
        """Copies the LoRA adapters, if any, and empties the KV cache of the old weights.

        Does nothing outside `with sampler:`, where there is no KV cache, as entering does it.
        """
        if not self.awake:
            return
        if self.slots:
            weight_sharing.copy_adapters(self.slots)
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: a completion is still being sampled")

    def __enter__(self) -> "NanoLLM":
        """Allocates the KV cache, and copies the LoRA adapters."""
        if self.policy.device.type == "cuda":
            free_cached_memory()  # vLLM allocates outside of PyTorch's cached memory
            self.engine.wake_up()
        self.awake = True
        self.sync()  # of the steps since; the content of the KV cache was freed with it
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Frees the KV cache."""
        self.awake = False
        engine_core = self.engine.engine_core.engine_core
        # vLLM schedules ahead, and removes finished requests with the step after them
        while engine_core.batch_queue or engine_core.scheduler.has_requests():
            self._step()
        if self.policy.device.type == "cuda":  # vLLM's CPU build has no sleep()
            self.engine.sleep(level=0)
            self.engine.release_kv_cache_memory()

    def close(self) -> None:
        """Shuts down the engine and frees its memory; the policy keeps the weights."""
        if self.engine is not None:
            if self.policy.device.type == "cuda" and not self.awake:
                # vLLM would unmap the memory of the KV cache a second time (vllm#36651)
                free_cached_memory()
                with suppress(RuntimeError):  # without the memory to wake up nothing is unmapped
                    self.engine.wake_up()
            self.engine.engine_core.shutdown()
        elif "vllm.distributed.parallel_state" in sys.modules:  # the start of the engine failed
            sys.modules["vllm.distributed.parallel_state"].cleanup_dist_env_and_memory()
        self.engine, self.slots = None, []
        free_cached_memory()

    def _start(self, utilization: float, reserved_bytes: int, num_rollouts: int) -> None:
        """Starts the engine on the shared weights; core/patches.py says what changes in vLLM."""
        from vllm.lora.request import LoRARequest
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        policy = self.policy
        # vLLM sets it for the whole process: keep the trainer's
        os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] = torch.get_float32_matmul_precision()
        arguments = _engine_arguments(policy, utilization, reserved_bytes, num_rollouts)
        arguments.return_sampling_mask = self.with_kept_ids
        weight_sharing.register_loader(policy.causal_lm)
        with (
            patches.pool_of_the_cache_alone(),
            patches.size_of_the_cache(PLENTY, partial(_cache_bytes, policy, num_rollouts)),
            patches.undecorated(type(policy.causal_lm.get_decoder())),
        ):
            self.engine = LLMEngine.from_engine_args(arguments, UsageContext.LLM_CLASS)
        if policy.lora_rank:
            request = self.lora_request = LoRARequest("policy", 1, "a folder that is not read")
            # adapters of zeros, for which vLLM reads no files; `sync` writes into the slots
            self.engine.collective_rpc(
                lambda worker: worker.model_runner.lora_manager.add_dummy_lora(request, rank=1)
            )
            self.engine.add_lora(request)
            [engine_model] = self.engine.apply_model(lambda model: model)
            self.slots = weight_sharing.adapter_slots(policy.causal_lm, engine_model)

    def _compare(self) -> None:
        """Raises UsageError if log-probs differ from training's: of a short prompt, or of one that
        is longer than any sliding window in the config that is shorter than the context."""
        policy, params = self.policy, SamplingParams(max_tokens=16)
        limits = [getattr(policy.causal_lm.config, name, None) or 0 for name in LIMITS]
        longest = 64 + max(limit for limit in [0, *limits] if limit < policy.max_length)
        length = max(1, min(longest, policy.max_length - params.max_tokens))
        words = policy.tokenizer.encode(canary.TEXT, add_special_tokens=False)
        long_prompt = random.Random(0).choices(words, k=length)
        subject, advice = f"{type(policy.causal_lm).__name__} in vLLM", "use --sampler torch"
        with torch.random.fork_rng([]), canary.noise(policy):  # vLLM for CPUs moves the generator
            self.sync()
            prompts = [long_prompt[:8], long_prompt]
            canary.check_gap(policy, self, prompts, params, subject, advice)


def why_not_shareable(policy: Policy, with_kept_ids: bool = False) -> str:
    """Says why vLLM cannot sample from this policy's weights, in one line; "" if it can."""
    if not is_installed("vllm"):
        return 'vLLM is not installed: pip install -e ".[vllm]"'
    config = policy.causal_lm.config
    if config.get_text_config() is not config:
        return f"vLLM cannot share multimodal models ({config.model_type}): take a text model"
    if policy.quantized or "quantization_config" in config.to_dict():
        return "vLLM cannot share quantized weights: leave --quantize out, take another model"
    not_a_or_b = r"lora_(?![AB]\.\w+\.weight$)|modules_to_save|trainable_tokens"  # PEFT's names
    if unknown := [name for name in policy.trainable() if re.search(not_a_or_b, name)]:
        return f"vLLM takes only A and B of LoRA adapters, not {unknown[0]}: train new adapters"
    if policy.device.index:
        variable = f"CUDA_VISIBLE_DEVICES={policy.device.index}"
        return f"vLLM uses the first visible GPU: set {variable} and --device cuda"
    with preserve_process_state():
        from vllm.platforms import current_platform

        vllm_device = current_platform.device_type or "another platform"
    if vllm_device != policy.device.type:
        return f"the installed vLLM is for {vllm_device}, not {policy.device.type}: change --device"
    if with_kept_ids and vllm_device != "cuda":  # its model runner for CPUs (V1) has no such thing
        return "vLLM returns what --top-k and --top-p keep on a GPU only: leave them out"
    return ""


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restores what vLLM changes in this process on exit: random generators, the number of threads
    and environment variables. Inside, ENVIRONMENT is set and Python warnings are hidden."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    variables = {**os.environ}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    os.environ.update(ENVIRONMENT)
    try:
        # vLLM needs a stdout with a file descriptor; in a notebook, sys.stdout has none
        hidden = warnings.catch_warnings(action="ignore")
        with torch.random.fork_rng(gpus), redirect_stdout(sys.__stdout__), hidden:
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads  # vLLM replaces the function
        torch.set_num_threads(num_threads)
        os.environ.clear()
        os.environ.update(variables)


def free_cached_memory() -> None:
    """Returns memory that PyTorch holds without a tensor to the GPU, for vLLM to allocate."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU


def save_config(config: Any, cache_root: str) -> str:
    """Writes the model's config.json into a folder named after its content; returns the folder.

    vLLM's compile cache depends on the folder, so models of the same config share it, wherever
    their weights come from. Each start writes the file again, as the old one may be damaged, and
    renames it, as another rank may be reading it.
    """
    config = copy.deepcopy(config)
    config._name_or_path = ""
    values = config.to_json_string(use_diff=False)
    digest = hashlib.sha256(values.encode()).hexdigest()[:16]
    folder = Path(cache_root, "nanollm", digest)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as part:
        config.save_pretrained(part)
        for file in Path(part).iterdir():
            file.replace(folder / file.name)
    return str(folder)


def _engine_arguments(
    policy: Policy, utilization: float, reserved_bytes: int, num_rollouts: int
) -> Any:
    """Returns vllm.EngineArgs."""
    import vllm

    on_cpu = policy.device.type == "cpu"
    arguments: dict[str, Any] = {}
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    else:
        free_cached_memory()
        free, total = torch.cuda.mem_get_info(policy.device)
        available = max(0, int(free - reserved_bytes - (1 - utilization) * total))
        arguments["gpu_memory_utilization"] = available / total
        if 0 < num_rollouts <= 256:  # vLLM's own limit is 512
            # a power of 2, because vLLM's cache of compiled code has other entries for each value
            arguments["max_cudagraph_capture_size"] = 1 << (num_rollouts - 1).bit_length()
    return vllm.EngineArgs(
        model=save_config(policy.causal_lm.config, vllm.envs.VLLM_CACHE_ROOT),
        hf_overrides={"architectures": [type(policy.causal_lm).__name__]},
        load_format=weight_sharing.LOAD_FORMAT,
        trust_remote_code=policy.trust_remote_code,
        dtype=str(policy.dtype).removeprefix("torch."),
        max_model_len=policy.max_length,
        skip_tokenizer_init=True,  # prompts and completions are token ids
        generation_config="vllm",  # ignore the model's own sampling defaults
        logprobs_mode="processed_logprobs",  # after temperature, top-k and top-p
        enable_prefix_caching=True,
        enable_sleep_mode=not on_cpu,
        enforce_eager=on_cpu,
        enable_flashinfer_autotune=False,
        block_size=CPU_BLOCK_SIZE if on_cpu else None,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        enable_lora=policy.lora_rank > 0,
        max_lora_rank=next(rank for rank in LORA_RANKS if rank >= policy.lora_rank),
        **arguments,
    )


def _cache_bytes(
    policy: Policy, num_rollouts: int, vllm_config: Any, plan: Any, available: int
) -> int:
    """Bytes of vLLM's KV cache: at most `available`, and no more than `num_rollouts` sequences of
    full length need (0: no limit), as a GPU wakes up more slowly the more memory it has to map.

    `plan` is vLLM's plan for a cache of PLENTY bytes. Raises UsageError if a sequence of full
    length does not fit on the GPU.
    """
    blocks = 1  # one stays empty
    for group in plan.kv_cache_groups:
        spec = group.kv_cache_spec
        blocks += -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
    needed = blocks * (PLENTY // plan.num_blocks)
    if policy.device.type == "cpu":
        return max(needed, available)
    if needed > available:
        raise UsageError(
            f"a sequence of {policy.max_length} tokens needs {needed / 2**30:.1f} GiB for its keys "
            f"and values, {max(0, available) / 2**30:.1f} GiB are free: lower --max-model-len, or "
            "raise --gpu-memory-utilization"
        )
    return min(available, needed * num_rollouts) if num_rollouts else available
