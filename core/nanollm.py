"""NanoLLM: a vLLM engine that samples from the training model's own weights.

A loader registered with vLLM hands it the training tensors, laid out by
core/weight_sharing.py, before it captures CUDA graphs. vLLM runs its own model code at its own
speed, and after `optimizer.step()` there is nothing to send: the next sample reads the new weights.
LoRA adapters are copied into the
engine's slots by `sync`; nothing is ever merged into the base.

Memory. The weights stay where they are, once. The cache of keys and values is there only inside
`with sampler:`; outside, its memory is training's.

    pip install -e ".[vllm]" && python train.py --sampler vllm
"""

import gc
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch

from core import distributed, process_state, weight_sharing
from core.model import Policy
from core.sampler import Sampler, SamplingParams, TorchSampler, room, to_completions
from core.types import Completion, UsageError

FAMILIES = ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM"]
LORA_RANKS = [1, 8, 16, 32, 64, 128, 256]  # of the slots that vLLM can make
CPU_CACHE_BYTES = 1 << 27
RANK_SEED = 998_244_353  # between the seeds of two ranks: vLLM has one for all that it samples
CPU_BLOCK = 32  # tokens; prompts shorter than vLLM's own 128 would not be shared
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent anywhere
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}


def make_sampler(
    name: str, policy: Policy, memory_share: float = 0.9, reserved_bytes: int = 0
) -> Sampler:
    """The sampler called `name`; auto: NanoLLM where vLLM and a GPU are there, else TorchSampler.

    The numbers are NanoLLM's. Raises UsageError as NanoLLM does, if that was asked for by name.
    """
    sampler = TorchSampler(policy)
    if name == "torch" or (name == "auto" and policy.device.type != "cuda"):
        return sampler
    try:
        check_shareable(policy)
    except UsageError as error:
        if name == "auto":
            sampler.remark = f"sampling in plain PyTorch: {error}"
            return sampler
        raise
    return NanoLLM(policy, memory_share, reserved_bytes)


class NanoLLM(Sampler):
    """Samples with vLLM, from the weights that are being trained."""

    def __init__(self, policy: Policy, memory_share: float = 0.9, reserved_bytes: int = 0):
        """Start the engine in this process, on the policy's device.

        While sampling, at most `memory_share` of the GPU's memory is in use, by training and
        sampling together; `reserved_bytes` of that stay free for what training has yet to allocate.
        Raises UsageError where vLLM or memory is missing and for a model that can't be shared; then
        nothing is left behind.
        """
        check_shareable(policy)
        memory = _memory(policy, memory_share, reserved_bytes)
        self.policy = policy
        self.engine: Any = None
        self.engine_model: Any = None  # vLLM's own module
        self.adapter: Any = None  # vLLM's request for the LoRA adapter
        self.slots: list[weight_sharing.Slot] = []
        self.cpu_cache: list[tuple[torch.UntypedStorage, int]] = []  # with the bytes of each
        self.awake = True
        self.shared = weight_sharing.share_weights(policy.causal_lm)
        self.folder = tempfile.TemporaryDirectory(prefix="nanollm-")  # for the adapter
        try:
            with process_state.preserve_process_state(**ENVIRONMENT):
                self._start(memory)
        except Exception as error:
            self.close()
            reason = f"{error}".strip().partition("\n")[0]
            raise UsageError(f"vLLM could not start: {reason}") from error
        self.__exit__()

    def sample(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        if not self.awake:
            raise RuntimeError("a sampler samples only inside `with sampler:`")
        if not prompts:
            return []
        import vllm

        how = vllm.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=room(self.policy, prompts, params.max_tokens),
            logprobs=0,  # those of the sampled tokens alone
            flat_logprobs=True,
            stop_token_ids=self.policy.stop_ids,
            ignore_eos=True,  # stop_token_ids says it all
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        written: dict[str, Any] = {}
        names = [str(i) for i in range(len(prompts))]
        # one seed for the whole call: one for each request costs a loop over them at every token
        with process_state.random_state_kept(params.seed + distributed.rank() * RANK_SEED):
            for name, prompt in zip(names, prompts, strict=True):
                tokens = vllm.TokensPrompt(prompt_token_ids=prompt)
                self.engine.add_request(name, tokens, how, lora_request=self.adapter)
            try:
                while self.engine.has_unfinished_requests():
                    on_progress()
                    for output in self.engine.step():
                        written[output.request_id] = output.outputs[0]
            finally:
                self.engine.abort_request([name for name in names if name not in written])
        outputs = [written[name] for name in names]
        assert all(len(o.token_ids) == len(o.logprobs.logprobs) for o in outputs), "one for each"
        return to_completions(
            self.policy,
            [list(output.token_ids) for output in outputs],
            [list(output.logprobs.logprobs) for output in outputs],
            [output.finish_reason == "stop" for output in outputs],
        )

    def sync(self) -> None:
        """Copy the adapters, if there are any, and forget what the old weights made of prompts."""
        if self.slots:
            weight_sharing.copy_adapters(self.slots)
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: a completion is still being written")

    def __enter__(self) -> "NanoLLM":
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()  # or PyTorch would still hold what vLLM takes again
            self.engine.wake_up()
        for storage, num_bytes in self.cpu_cache:
            storage.resize_(num_bytes)
            torch.tensor([], dtype=torch.uint8).set_(storage).zero_()
        self.awake = True
        self.sync()  # what was cached of prompts is gone
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.awake = False
        if self.policy.device.type == "cuda":
            self.engine.sleep(level=1)
        for storage, _ in self.cpu_cache:
            storage.resize_(0)

    def close(self) -> None:
        """Shut the engine down and free what it took; the weights stay with the policy."""
        if self.engine is not None:
            self.engine.engine_core.shutdown()
        elif "vllm.distributed.parallel_state" in sys.modules:  # it got half way
            sys.modules["vllm.distributed.parallel_state"].cleanup_dist_env_and_memory()
        self.engine, self.engine_model = None, None
        self.slots, self.cpu_cache = [], []
        gc.collect()
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        self.folder.cleanup()

    def _start(self, memory: dict[str, Any]) -> None:
        import vllm
        from vllm import envs
        from vllm.lora.request import LoRARequest
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.worker.gpu_worker import Worker

        policy, on_cpu = self.policy, self.policy.device.type == "cpu"
        arguments = vllm.EngineArgs(
            model=_config_folder(policy, envs.VLLM_CACHE_ROOT),
            hf_overrides={"architectures": [type(policy.causal_lm).__name__]},
            load_format=weight_sharing.register_loader(self.shared),
            trust_remote_code=policy.trust_remote_code,
            dtype=str(policy.dtype).removeprefix("torch."),
            max_model_len=policy.max_length,
            skip_tokenizer_init=True,  # ids in, ids out
            generation_config="vllm",  # SamplingParams alone says how to draw
            logprobs_mode="processed_logprobs",  # of the distribution that was drawn from
            enable_prefix_caching=True,
            enable_sleep_mode=not on_cpu,
            enforce_eager=on_cpu,
            block_size=CPU_BLOCK if on_cpu else None,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **memory,
            **_lora_arguments(policy),
        )
        pool = Worker._maybe_get_memory_pool_context

        def pool_of_the_cache(worker: Worker, tag: str) -> Any:
            return pool(worker, tag) if tag == "kv_cache" else nullcontext()

        # only what is allocated in vLLM's pool goes to sleep: the weights must not
        with patch.object(Worker, "_maybe_get_memory_pool_context", pool_of_the_cache):
            self.engine = LLMEngine.from_engine_args(arguments, UsageContext.LLM_CLASS)
        [self.engine_model] = self.engine.apply_model(lambda model: model)
        if policy.lora_rank:
            adapter = os.path.join(self.folder.name, "adapter")
            policy.model.save_pretrained(adapter, save_embedding_layers=False)
            self.adapter = LoRARequest("policy", 1, adapter)
            self.engine.add_lora(self.adapter)
            self.slots = weight_sharing.adapter_slots(policy.causal_lm, self.engine_model)
        if on_cpu:  # whose build of vLLM has no sleep
            [caches] = self.engine.collective_rpc(lambda worker: worker.model_runner.kv_caches)
            storages = {c.untyped_storage().data_ptr(): c.untyped_storage() for c in caches}
            self.cpu_cache = [(storage, storage.nbytes()) for storage in storages.values()]
        weight_sharing.check_bound(self.engine_model, self.shared)


def check_shareable(policy: Policy) -> None:
    """Raise UsageError if vLLM is not there or can't take this policy's weights as they are."""
    otherwise = "or take --sampler torch"
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(f'vLLM is not installed: pip install -e ".[vllm]", {otherwise}')
    family = type(policy.causal_lm).__name__
    if family not in FAMILIES:
        known = ", ".join(name.removesuffix("ForCausalLM") for name in FAMILIES)
        raise UsageError(
            f"vLLM shares weights with {known}, not with {family}; take one, {otherwise}"
        )
    if "quantization_config" in policy.causal_lm.config.to_dict():
        raise UsageError(f"quantised weights can't be shared; load them in bfloat16, {otherwise}")
    if policy.lora_rank > LORA_RANKS[-1]:
        raise UsageError(f"--lora-rank {policy.lora_rank}: vLLM's limit is {LORA_RANKS[-1]}")
    if policy.device.index:
        gpu = policy.device.index
        raise UsageError(f"vLLM takes the first GPU: set CUDA_VISIBLE_DEVICES={gpu}, --device cuda")
    with process_state.preserve_process_state(**ENVIRONMENT):
        from vllm.platforms import current_platform

        build = current_platform.device_type or "no device of this machine"
    if build != policy.device.type:
        raise UsageError(
            f"this vLLM is for {build}, not {policy.device.type}: change --device, {otherwise}"
        )


def _config_folder(policy: Policy, cache: str) -> str:
    """A folder with the model's config alone, the same one each time: vLLM's compile cache asks."""
    config = policy.causal_lm.config
    name = hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest()[:16]
    folder = os.path.join(cache, "nanollm", name)
    config.save_pretrained(folder)
    return folder


def _lora_arguments(policy: Policy) -> dict[str, Any]:
    if not policy.lora_rank:
        return {}
    rank = next(rank for rank in LORA_RANKS if rank >= policy.lora_rank)
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 1}


def _memory(policy: Policy, share: float, reserved: int) -> dict[str, Any]:
    """What vLLM may take, in its arguments; UsageError if the longest sequence does not fit."""
    weights = policy.causal_lm.named_parameters()
    cached = [p for name, p in weights if name.endswith("weight") and ".lora_" not in name
              and (".k_proj." in name or ".v_proj." in name)]  # fmt: skip
    rows = sum(map(len, cached))  # numbers that a token leaves in the cache
    needed = policy.max_length * rows * policy.dtype.itemsize
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(policy.device)
        there = max(0, int(free - reserved - (1 - share) * total))
        arguments: dict[str, Any] = {"gpu_memory_utilization": there / total}
    else:
        import psutil

        there = psutil.virtual_memory().available
        arguments = {"kv_cache_memory_bytes": max(needed, CPU_CACHE_BYTES)}
    if there < needed:
        raise UsageError(
            f"{policy.max_length} tokens need {needed / 2**30:.1f} GiB for their keys and values, "
            f"{there / 2**30:.1f} GiB are free: lower --max-model-len, or raise "
            f"--gpu-memory-utilization from {share:g}"
        )
    return arguments
