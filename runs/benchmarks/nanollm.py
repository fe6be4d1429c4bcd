"""Tokens per second of NanoLLM, plain vLLM and `generate`, and the cost of sharing the weights.

    python runs/benchmarks/nanollm.py                   # on a GPU: 0.6B, 1.7B, 4B
    python runs/benchmarks/nanollm.py --sizes tiny      # the default on a CPU
    python runs/benchmarks/nanollm.py --rounds 1 --no-write

Each sampler is a process of its own with a warm engine, and the samplers take turns, so that other
load on the machine falls on all of them. The models have random weights in the shapes of
runs/benchmarks/workload.py; nothing is downloaded. All engines run in the process that calls
them. Results go to <machine>.json and to README.md.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
RESULTS = Path(__file__).resolve().parent / "nanollm"
sys.path += [str(RESULTS.parents[i]) for i in range(3)]

from record import commit, spread, versions, write_table  # noqa: E402
from workload import SHAPES, memory_used, save_model  # noqa: E402

LABELS = {
    "nanollm": "NanoLLM",
    "vllm": "plain vLLM",
    "backend": "vLLM's transformers backend, eager",
    "generate": "transformers generate",
}
Sample = Callable[[], int]  # samples all completions, returns the number of tokens
MEMORY_SHARE = 0.22  # of the GPU, for each engine: all of them are warm at the same time


@dataclass
class Args:
    """What to measure."""

    sizes: tuple[str, ...] = ()  # of tiny, 0.6B, 1.7B, 4B; none: all but tiny on a GPU, else tiny
    rounds: int = 5  # turns of each sampler
    num_prompts: int = 16  # different prompts
    group_size: int = 8  # completions of each prompt
    prompt_tokens: int = 256
    max_tokens: int = 256  # tokens of every completion
    samplers: tuple[str, ...] = ("nanollm", "vllm", "backend", "generate")
    parts: tuple[str, ...] = ("full", "lora", "bfloat16", "float16")  # what else to measure
    write: bool = True  # save the results as JSON and write the table into README.md
    out: str = ""  # also write the results so far as JSON to this file, after each round
    child: str = ""  # internal: the part of a child process
    folder: str = ""  # of a model of the one size, made by workload.py; none: it is made


def main(args: Args) -> None:
    sizes = args.sizes or (("0.6B", "1.7B", "4B") if on_gpu() else ("tiny",))
    machine = torch.cuda.get_device_name() if on_gpu() else f"CPU, {os.cpu_count()} cores"
    result: dict[str, Any] = {
        "machine": machine,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit() if args.write else "",
        "command": f"python runs/benchmarks/nanollm.py {' '.join(sys.argv[1:])}".strip(),
        "versions": versions(),
        "workload": {k: getattr(args, k) for k in
                     ("num_prompts", "group_size", "prompt_tokens", "max_tokens", "rounds")},
        "sizes": {},
    }  # fmt: skip
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            if not args.folder:
                save_model(folder, SHAPES[size], "bfloat16" if on_gpu() else "float32")
            result["sizes"][size] = measure(args, size, args.folder or folder)
        print("\n".join(["", f"{size} on {machine}", *size_tables(result["sizes"][size])]))
        if args.write:
            name = machine.lower().replace(" ", "-") if on_gpu() else "cpu"
            (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            write_tables()


def measure(args: Args, size: str, folder: str) -> dict[str, Any]:
    """Returns all results for a model of one size."""
    results: dict[str, Any] = {"speed": measure_speed(args, folder)}
    for part in args.parts:
        if part == "float16" and not on_gpu():
            continue  # vLLM's CPU build does not have float16 kernels for every CPU
        child = start(args, part, folder)
        results[part] = ask(child)
        stop(child)
        print(f"{size} {part}: {results[part]}", flush=True)
        save_so_far(args, results)
    return results


def save_so_far(args: Args, results: dict[str, Any]) -> None:
    if args.out:
        Path(args.out).write_text(json.dumps(results) + "\n")


def measure_speed(args: Args, folder: str) -> dict[str, Any]:
    """Returns the tokens per second of every sampler, or the error if it could not run."""
    started = {name: start(args, name, folder) for name in args.samplers}  # they import meanwhile
    children, results = {}, {}
    for name, child in started.items():
        first = ask(child)  # the start-up time, or an error
        if "error" in first:
            results[name] = first
            stop(child)
        else:
            children[name] = child
            results[name] = {"tokens_per_s": [], "start_s": first["start_s"]}
    for turn in range(args.rounds):
        for name, child in children.items():
            found = ask(child)
            if "error" in found or "error" in results[name]:
                results[name] = {"error": found.get("error", results[name].get("error"))}
                continue
            rate = found["tokens_per_s"]
            results[name]["tokens_per_s"].append(rate)
            print(f"round {turn + 1}: {LABELS[name]:34} {rate:9.0f} tokens/s", flush=True)
        save_so_far(args, {"speed": results})
    for child in children.values():
        stop(child)
    return results


def start(args: Args, part: str, folder: str) -> subprocess.Popen[str]:
    """Starts a child process; `ask` makes it work."""
    numbers = {k: v for k, v in vars(args).items() if type(v) is int}
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in numbers.items()]
    return subprocess.Popen(
        [sys.executable, __file__, f"--child={part}", f"--folder={folder}", *flags],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def ask(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Makes the child do its next piece of work and returns the JSON object that it prints."""
    assert child.stdin and child.stdout
    with suppress(BrokenPipeError):  # it has ended
        child.stdin.write("\n")
        child.stdin.flush()
    for line in child.stdout:
        if line.startswith("{"):
            return json.loads(line)
    return {"error": f"ended with exit code {child.wait()}"}


def stop(child: subprocess.Popen[str]) -> None:
    assert child.stdin
    with suppress(BrokenPipeError):
        child.stdin.close()
    child.wait()


def write_tables() -> None:
    """Writes the tables of all machines into README.md, from the saved results."""
    lines: list[str] = []
    for file in sorted(RESULTS.glob("*.json")):
        result = json.loads(file.read_text())
        used = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
        work = result["workload"]
        lines += [
            f"### {result['machine']}", "",
            f"`{result['command']}` at commit {result['commit']}, {result['date']}; {used}. "
            f"{work['num_prompts']} prompts of {work['prompt_tokens']} tokens, "
            f"{work['group_size']} completions of {work['max_tokens']} tokens each; medians of "
            f"{work['rounds']} turns.", "",
        ]  # fmt: skip
        for size, results in result["sizes"].items():
            lines += [f"**{size}**", "", *size_tables(results), ""]
    write_table(RESULTS, lines[:-1])


def size_tables(results: dict[str, Any]) -> list[str]:
    """Speed, then sync and gap, then memory, as Markdown."""
    ours = results["speed"].get("nanollm", {}).get("tokens_per_s")
    lines = ["| sampler | tokens/s: median [lowest, highest] | NanoLLM / sampler |",
             "| --- | --- | --- |"]  # fmt: skip
    for name, found in results["speed"].items():
        rates, label = found.get("tokens_per_s"), LABELS[name]
        if rates:
            ratio = f"{statistics.median(ours) / statistics.median(rates):.2f}" if ours else ""
            lines.append(f"| {label} | {spread(rates, ',.0f')} | {ratio} |")
        else:
            lines.append(f"| {label} | {found['error']} | |")
    lines += ["", "| sync, gap | |", "| --- | --- |"]
    for part, label in [("full", "sync, full fine-tuning"), ("lora", "sync, LoRA of rank 32")]:
        if part not in results:
            continue
        cost = results[part]
        value = cost.get("error") or f"{cost['sync_s'] * 1e3:.2f} ms, {cost['sync_bytes']:,} bytes"
        lines.append(f"| {label} | {value} |")
    for part in ("bfloat16", "float16"):
        if part in results:
            gaps = results[part]
            value = gaps.get("error") or (
                f"mean {gaps['mean']:.1e}, max {gaps['max']:.1e} nats; {gaps['tokens']:,} tokens"
            )
            lines.append(f"| gap to the trainer, {part} | {value} |")
    lines += ["", "| memory in use | GiB |", "| --- | --- |"]
    stages = results.get("full", {}).get("memory_gib", {})
    return lines + [f"| {name} | {used:.2f} |" for name, used in stages.items()]


# --- child processes -----------------------------------------------------------------------------


def run_child(args: Args) -> None:
    """Waits for a line on stdin, does one piece of work, prints a JSON object; until stdin ends."""
    try:
        if args.child != "generate":
            with suppress(ImportError):
                import vllm  # noqa: F401
        sys.stdin.readline()
        if args.child in PARTS:
            answer(PARTS[args.child](args))
            return
        started = time.perf_counter()
        sample = SAMPLERS[args.child](args)
        sample()  # compiles and captures graphs
        answer({"start_s": time.perf_counter() - started})
        while sys.stdin.readline():
            before = time.perf_counter()
            num_tokens = sample()
            answer({"tokens_per_s": num_tokens / (time.perf_counter() - before)})
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"})
        raise


def answer(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


def prompts(args: Args) -> list[list[int]]:
    """Returns P random prompts, each repeated G times in a row."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.num_prompts, args.prompt_tokens)
    distinct = torch.randint(0, 256, shape, generator=generator).tolist()
    return [prompt for prompt in distinct for _ in range(args.group_size)]


def make_nanollm(args: Args, **options: Any) -> tuple[Any, Any]:
    """Returns a policy and a NanoLLM on its weights."""
    from core.config import Config
    from core.loading import load_policy
    from core.nanollm import NanoLLM

    policy = load_policy(
        Config(max_model_len=args.prompt_tokens + args.max_tokens, **options), args.folder
    )
    free = torch.cuda.mem_get_info()[0] / torch.cuda.mem_get_info()[1] if on_gpu() else 1.0
    share = min(0.9, 1 - free + MEMORY_SHARE)
    num_rollouts = args.num_prompts * args.group_size
    return policy, NanoLLM(policy, share, num_rollouts=num_rollouts)


def sample_with_nanollm(args: Args) -> Sample:
    from core.sampler import SamplingParams

    _, sampler = make_nanollm(args)
    batch = prompts(args)
    sampler.__enter__()

    def sample() -> int:
        sampler.sync()  # as after an update: empties the prefix cache
        completions = sampler.sample(batch, SamplingParams(args.max_tokens, seed=1))
        return sum(len(completion.token_ids) for completion in completions)

    return sample


def sample_with_vllm(args: Args, **options: Any) -> Sample:
    import vllm

    memory = (
        {"gpu_memory_utilization": MEMORY_SHARE}
        if on_gpu()
        else {"kv_cache_memory_bytes": 1 << 27, "enforce_eager": True, "block_size": 32}
    )
    llm = vllm.LLM(
        model=args.folder, dtype="bfloat16" if on_gpu() else "float32",  # as NanoLLM
        skip_tokenizer_init=True, logprobs_mode="processed_logprobs",
        max_model_len=args.prompt_tokens + args.max_tokens, generation_config="vllm",
        **(memory | options),
    )  # fmt: skip
    batch = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts(args)]
    params = vllm.SamplingParams(
        temperature=1.0, max_tokens=args.max_tokens, logprobs=0, detokenize=False, ignore_eos=True
    )

    def sample() -> int:
        llm.reset_prefix_cache()
        completions = llm.generate(batch, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in completions)

    return sample


def sample_with_backend(args: Args) -> Sample:
    return sample_with_vllm(args, model_impl="transformers", enforce_eager=True)


def sample_with_generate(args: Args) -> Sample:
    from core.config import Config
    from core.loading import load_policy

    policy = load_policy(Config(), args.folder)
    policy.model.generation_config.eos_token_id = None  # every completion has its full length
    batch = torch.tensor(prompts(args), device=policy.device)

    @torch.no_grad()
    def sample() -> int:
        completions = policy.model.generate(
            batch, attention_mask=torch.ones_like(batch), do_sample=True, temperature=1.0, top_k=0,
            max_new_tokens=args.max_tokens, use_cache=True,
        )  # fmt: skip
        return completions[:, batch.shape[1] :].numel()

    return sample


def full(args: Args) -> dict[str, Any]:
    """Full fine-tuning: the cost of a sync, and the memory of each phase of an update."""
    from core.config import Config
    from core.loading import load_policy
    from core.nanollm import NanoLLM
    from core.optimizer import make_optimizer
    from core.sampler import SamplingParams

    policy = load_policy(Config(max_model_len=args.prompt_tokens + args.max_tokens), args.folder)
    stages = {"model loaded": memory_used()}
    optimizer = make_optimizer(policy, lr=1e-6)
    stages["optimiser made"] = memory_used()
    sampler = NanoLLM(policy, 0.9)
    stages["engine asleep"] = memory_used()
    batch = prompts(args)
    syncs = []
    for update in range(3):
        with sampler:
            syncs.append(timed(sampler.sync))
            completions = sampler.sample(batch, SamplingParams(args.max_tokens, seed=update))
            stages[f"sampling {update + 1}"] = memory_used()
        stages[f"asleep {update + 1}"] = memory_used()
        for prompt, completion in zip(batch[:4], completions, strict=False):
            ids = torch.tensor([prompt + completion.token_ids], device=policy.device)
            logits = policy.to_logits(policy.hidden_states(ids))[0, :-1]
            torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
        optimizer.step()
        stages[f"training {update + 1}, peak"] = peak_memory()
        optimizer.zero_grad()
    return {"sync_s": statistics.median(syncs), "sync_bytes": 0, "memory_gib": stages}


def lora(args: Args) -> dict[str, Any]:
    """LoRA of rank 32: the seconds and bytes of a sync."""
    _, sampler = make_nanollm(args, lora_rank=32)
    with sampler:
        seconds = statistics.median(timed(sampler.sync) for _ in range(20))
    num_bytes = sum(s.engine_A.nbytes + s.engine_B.nbytes for s in sampler.slots)
    return {"sync_s": seconds, "sync_bytes": num_bytes, "rank": 32}


def gap(args: Args) -> dict[str, Any]:
    """|trainer - sampler| log-prob in nats, in the precision that names the part."""
    from core import canary
    from core.sampler import SamplingParams

    policy, sampler = make_nanollm(args, dtype=args.child)
    batch = prompts(args)[:: args.group_size]
    with sampler:
        completions = sampler.sample(batch, SamplingParams(args.max_tokens, seed=1))
    pairs = zip(batch, completions, strict=True)
    all_gaps = torch.cat([canary.gaps(policy, *pair) for pair in pairs])
    return {"mean": all_gaps.mean().item(), "max": all_gaps.max().item(), "tokens": len(all_gaps)}


def on_gpu() -> bool:
    return torch.cuda.is_available()


def timed(call: Callable[[], Any]) -> float:
    if on_gpu():
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def peak_memory() -> float:
    """Returns the most GiB that PyTorch held since the last `memory_used`; resident on a CPU."""
    return torch.cuda.max_memory_reserved() / 2**30 if on_gpu() else memory_used()


SAMPLERS: dict[str, Callable[[Args], Sample]] = {
    "nanollm": sample_with_nanollm,
    "vllm": sample_with_vllm,
    "backend": sample_with_backend,
    "generate": sample_with_generate,
}
PARTS: dict[str, Callable[[Args], dict[str, Any]]] = {
    "full": full,
    "lora": lora,
    "bfloat16": gap,
    "float16": gap,
}

if __name__ == "__main__":
    arguments = tyro.cli(Args, description=__doc__)
    run_child(arguments) if arguments.child else main(arguments)
