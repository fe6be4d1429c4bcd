"""A training step of picoRL and of TRL's GRPOTrainer: sampling, training pass, optimizer step.

    python runs/benchmarks/vs_trl.py         # on the CPU, 10 minutes
    python runs/benchmarks/vs_trl.py --rounds 1 --steps 1 --no-write
    python runs/benchmarks/vs_trl.py --model 0.6B --device cuda     # on a GPU, all weights
    python runs/benchmarks/vs_trl.py --model 4B --lora-rank 32 --device cuda

Both sides load the same model, use the same prompts, sample the same number of tokens (checked) and
train once on all of them, without a reference model or gradient checkpointing: in float32 on a CPU,
on a GPU in bfloat16 with vLLM in the process of each. picoRL runs `train.main`, including its
metrics and rollout files, without the pass after the step for the report, which TRL does not have.
TRL runs `GRPOTrainer.train` with its other defaults. Neither saves a checkpoint. A step lasts from
the end of one step to the end of the next; the first of a process is left out.

The model has random weights, and never ends a completion, on any engine: one coordinate of the
residual stream is 1 in the embedding of every token, no layer writes to it, and the output row of
the end token has -1000 there, so its logit is over 100 below all others, in any dtype.
"""

import json
import os
import random
import resource
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch  # noqa: E402
import tyro  # noqa: E402
from record import commit, machine, markdown, spread, versions, write_table  # noqa: E402

from core import settings  # noqa: E402
from core.types import Message  # noqa: E402
from environments.base import Env, Step  # noqa: E402
from environments.plumbing.registry import register  # noqa: E402

SIZES = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
SIZES += ["num_key_value_heads", "head_dim", "vocab_size"]
SHAPES = {  # of a Qwen3, in the order of SIZES
    "tiny": (128, 384, 4, 4, 2, 32, 704),
    "4M": (256, 768, 5, 4, 2, 64, 704),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151936),
    "4B": (2560, 9728, 36, 32, 8, 128, 151936),
}
GROUP_SIZE = 8
GB = 2**30


@dataclass
class Args:
    """The model and the work to measure."""

    model: Literal["4M", "0.6B", "4B"] = "4M"
    device: Literal["cpu", "cuda"] = "cpu"
    lora_rank: int = 0  # 0: all weights
    num_prompts: int = 8  # with 8 completions each
    prompt_tokens: tuple[int, ...] = ()  # one case each; none: 50 and 200, on a GPU 200
    max_tokens: int = 0  # of every completion, exactly; 0: 64, on a GPU 512
    steps: int = 4  # measured in each process, after one step that is not measured
    rounds: int = 5  # of each side, in turn
    write: bool = True  # on a CPU: save the results as JSON and write the table into README.md

    def __post_init__(self) -> None:
        cpu = self.device == "cpu"
        self.prompt_tokens = self.prompt_tokens or ((50, 200) if cpu else (200,))
        self.max_tokens = self.max_tokens or (64 if cpu else 512)

    @property
    def budget(self) -> int:
        return self.num_prompts * GROUP_SIZE * self.max_tokens


def main(args: Args) -> None:
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited by the children
    with tempfile.TemporaryDirectory() as folder:
        dtype = "float32" if args.device == "cpu" else "bfloat16"
        in_fresh_process(save_model, folder, SHAPES[args.model], dtype)
        cases = {tokens: measure(args, folder, tokens) for tokens in args.prompt_tokens}
    lines = table(args, cases)
    print("\n".join(["", *lines]), flush=True)
    command = shlex.join(["python", f"runs/benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    threads = torch.get_num_threads()
    setup = {"machine": machine(), "commit": commit(), "command": command, "threads": threads}
    result = setup | {"versions": versions(), "cases": cases}
    if args.device == "cuda":
        print(json.dumps(result))
    elif args.write:
        (HERE / "speed/vs_trl-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
        packages = ", ".join(f"{package} {number}" for package, number in versions().items())
        source = f"`{command}` at commit {commit()} on {machine()}; {threads} threads; {packages}."
        write_table(HERE / "speed", [source, "", *lines], "vs_trl")


def measure(args: Args, folder: str, prompt_tokens: int) -> dict[str, list[dict[str, Any]]]:
    """Measures both sides in turn, A B A B .. Raises RuntimeError if they did different work."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for turn in range(args.rounds):
        for name, side in SIDES.items():
            answer = in_fresh_process(side, args, folder, prompt_tokens)
            if {*answer["sampled"]} != {args.budget} or answer["prompt_tokens"] != prompt_tokens:
                raise RuntimeError(f"{name} sampled other tokens than {args.budget}: {answer}")
            results[name].append(answer)
            case = f"prompts of {prompt_tokens} tokens, round {turn + 1} of {args.rounds}"
            print(f"{case}: {name:6} {answer['step_s']:.4g} s", flush=True)
    return results


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def table(args: Args, cases: dict[int, dict[str, list[dict[str, Any]]]]) -> list[str]:
    """One row per length of the prompts and side, as Markdown."""
    rows = []
    trained = f"LoRA {args.lora_rank}" if args.lora_rank else "all weights"
    for prompt_tokens, sides in cases.items():
        ours, theirs = ([answer["step_s"] for answer in answers] for answers in sides.values())
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]  # pairs have the same load
        for name, answers in sides.items():
            keys = ("step_s", "sampling_s", "memory_gb")
            steps, sampling, peak = ([answer[key] for answer in answers] for key in keys)
            case = f"{args.model}, {trained}", f"{args.num_prompts} of {prompt_tokens}"
            ratio = spread(ratios) if name == "TRL" else ""
            seconds = spread(steps), spread(sampling)
            rows.append([*case, f"{args.budget:,}", name, *seconds, ratio, spread(peak, ".1f")])
    head = "model | prompts | tokens per step | side | step, s | sampling, s | picoRL / TRL"
    return markdown(f"{head} | peak, GB", rows)


# --- the work ------------------------------------------------------------------------------------


def save_model(folder: str, shape: tuple[int, ...], dtype: str) -> None:
    """Saves a model with random weights that never ends a completion, and its tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from core.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = dict(zip(SIZES, shape, strict=True)) | {"max_position_embeddings": 4096}
    config = Qwen3Config(**sizes, **ends, bos_token_id=None, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.model.embed_tokens.weight[:, 0] = 1
        model.model.embed_tokens.weight[tokenizer.eos_token_id, 0] = -1000.0  # finite in float16
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prompt(seed: int, tokens: int) -> list[Message]:
    """A chat of exactly `tokens` tokens: each digit is one, the template adds three."""
    text = "".join(random.Random(seed).choices("0123456789", k=tokens - 3))
    return [{"role": "user", "content": text}]


def reward(text: str) -> float:
    """The fraction of vowels: cheap to compute, and different between completions."""
    return sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text))


@register("speed")
class Speed(Env):
    """One turn: a prompt of `tokens` tokens."""

    def __init__(self, tokens: int = 50):
        self.tokens = tokens

    def reset(self, seed: int) -> list[Message]:
        return prompt(seed, self.tokens)

    def step(self, response: str) -> Step:
        return Step(None, reward(response), True, {"correct": False})


@dataclass
class StepTimer:
    """The times, tokens and peak memory of the steps of one process."""

    sampling: list[float] = field(default_factory=list)  # seconds, one per step
    ends: list[float] = field(default_factory=list)  # time at the end of each step
    sampled: list[int] = field(default_factory=list)  # tokens, one per step
    prompt_tokens: int = 0
    peak: int = 0  # bytes in use on the GPU by all allocators, after the first step

    def __post_init__(self) -> None:
        if torch.cuda.is_available():
            threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        while True:
            free, total = torch.cuda.mem_get_info()
            if self.ends:
                self.peak = max(self.peak, total - free)
            time.sleep(0.01)

    def step_ended(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def time_sampling(self, sample: Callable) -> Callable:
        """Wraps the function that samples; its time counts as sampling."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = sample(*args, **kwargs)
            self.sampling.append(time.perf_counter() - started)
            return result

        return timed

    def answer(self) -> dict[str, Any]:
        steps = [b - a for a, b in pairwise(self.ends)]
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        seconds = {"step_s": statistics.median(steps), "steps_s": steps}
        seconds["sampling_s"] = statistics.median(self.sampling[1:])
        tokens = {"sampled": self.sampled, "prompt_tokens": self.prompt_tokens}
        return seconds | tokens | {"memory_gb": (self.peak or resident) / GB}


def picorl(args: Args, folder: str, prompt_tokens: int) -> dict[str, Any]:
    """Measures steps of picoRL, in a run of train.py."""
    import train
    from core.loop import play, run
    from core.loop.run import Run

    timer = StepTimer()
    collect, log = play.collect, Run.log

    def collect_rollouts(*collect_args: Any) -> Any:
        sampled, trained, canary = collect(*collect_args)
        timer.prompt_tokens = len(sampled[0].turns[0].prompt_ids)
        return sampled, trained, canary

    def end_step(run: Run, update: int, metrics: dict[str, Any], rollouts: list) -> None:
        log(run, update, metrics, rollouts)
        if update > 0:
            assert metrics["tokens/trained"] == metrics["tokens/sampled"]
            timer.sampled.append(metrics["tokens/sampled"])
            timer.step_ended()

    play.collect = timer.time_sampling(collect_rollouts)
    Run.log = end_step
    Run.save = lambda run: False
    run.trace_tokens = lambda *trace_args: {}
    os.chdir(tempfile.mkdtemp(dir=folder))  # for runs/
    sampler, micro_batch = ("torch", 2048) if args.device == "cpu" else ("vllm", 8192)
    flags = f"""--model-id {folder} --env speed:tokens={prompt_tokens} --max-turns 1
        --num-updates {args.steps + 1} --sft-steps 0 --eval-num-tasks 0 --save-every 0
        --num-prompts {args.num_prompts} --group-size {GROUP_SIZE} --max-tokens {args.max_tokens}
        --max-model-len {prompt_tokens + args.max_tokens} --lora-rank {args.lora_rank}
        --max-tokens-per-micro-batch {micro_batch} --sampler {sampler} --device {args.device}"""
    train.main(settings.parse(flags.split()))
    return timer.answer()


def trl(args: Args, folder: str, prompt_tokens: int) -> dict[str, Any]:
    """Measures steps of TRL's GRPOTrainer.

    TRL has its defaults, except for the workload and options that save memory, not time; and it has
    the same adapters as picoRL.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    timer, rank = StepTimer(), args.lora_rank
    rows = 16 if args.device == "cpu" else 8  # completions of a micro-batch

    class EndOfStep(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            timer.step_ended()

    def rewards(completions: list, **rest: Any) -> list[float]:
        return [reward(completion[0]["content"]) for completion in completions]

    prompts = [prompt(seed, prompt_tokens) for seed in range(args.num_prompts * (args.steps + 1))]
    off = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    off["gradient_checkpointing"] = False
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        max_steps=args.steps + 1,
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=args.num_prompts * GROUP_SIZE // rows,
        max_completion_length=args.max_tokens,
        learning_rate=2e-5 if rank else 1e-6,
        **engine_options(args, folder, prompt_tokens) | off,
    )
    adapters = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", "lora_alpha": 2 * rank}
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=rewards,
        callbacks=[EndOfStep()],
        train_dataset=Dataset.from_list([{"prompt": messages} for messages in prompts]),
        args=config,
        peft_config=LoraConfig(r=rank, **adapters) if rank else None,
    )
    sample = trainer._generate_single_turn

    def generate(prompt_ids: list, *sample_args: Any, **options: Any) -> Any:
        result = sample(prompt_ids, *sample_args, **options)
        timer.prompt_tokens = len(prompt_ids[0])
        timer.sampled.append(sum(map(len, result[0])))
        return result

    trainer._generate_single_turn = timer.time_sampling(generate)
    trainer.train()
    return timer.answer()


def engine_options(args: Args, folder: str, prompt_tokens: int) -> dict[str, Any]:
    """TRL's options for the CPU in float32, or for a GPU with vLLM in its process.

    On a GPU both sides compute in bfloat16 over float32 weights; the frozen weights of LoRA are
    bfloat16 on both. TRL's engine gets the memory of its weights, the cache of all rows, and 4 GB;
    TRL's default of 0.3 would reserve memory that it does not use.
    """
    if args.device == "cpu":
        return {"use_cpu": True, "bf16": False, "model_init_kwargs": {"dtype": "float32"}}
    _, _, layers, _, kv_heads, head_dim, _ = SHAPES[args.model]
    length = prompt_tokens + args.max_tokens
    rows = args.num_prompts * GROUP_SIZE * (length + 16)
    cache = 4 * layers * kv_heads * head_dim * rows  # keys and values of two bytes
    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    _, total = torch.cuda.mem_get_info()
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": (weights + 1.1 * cache + 4 * GB) / total,
        "vllm_max_model_length": length,
        "model_init_kwargs": {"dtype": "bfloat16" if args.lora_rank else "float32"},
    }


SIDES = {"picoRL": picorl, "TRL": trl}

if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
