"""A whole step of picoRL beside one of TRL's GRPOTrainer: sampling, training pass, optimiser step.

    python runs/benchmarks/speed/vs_trl.py  # on the CPU, about 10 minutes
    python runs/benchmarks/speed/vs_trl.py --gpu  # TRL with vLLM in its process; needs vLLM
    python runs/benchmarks/speed/vs_trl.py --rounds 1 --steps 1 --no-write  # a quick look

Both read the same folder, play the same prompts, sample as many tokens (checked: the run fails
otherwise) and learn from all of them once, without a reference model or gradient checkpointing. On
the CPU in float32. picoRL runs `train.play_and_learn` in a run as train.py opens it, its metrics
and rollouts written to the journal, without the microscope (a pass after the step, for the report,
that TRL has no like of). TRL runs `GRPOTrainer.train`, its defaults otherwise. The time of a step
is from the end of one to the end of the next; the first one of a process is left out.
"""

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tyro
from pairs import in_child, in_turn, play_part, publish, ratios, spread, verdict

GOALS = {50: 0.6, 200: 0.4}  # share of TRL's time, on the CPU, by the tokens of the prompt
SIZES = ("0.6B", "1.7B", "4B")
RANK = 32
GB = 2**30


@dataclass
class Args:
    """What to measure."""

    rounds: int = 5  # pairs of fresh processes
    steps: int = 4  # measured in each process, after one that is not
    prompt_tokens: tuple[int, ...] = (50, 200)
    num_prompts: int = 8
    group_size: int = 8
    max_tokens: int = 64  # of every completion
    our_tokens: int = 2048  # padded tokens of our micro-batches
    trl_rows: int = 16  # completions of TRL's micro-batches
    shape: str = "4M"  # see workload.py
    gpu: bool = False  # pair with TRL and vLLM on a GPU: SIZES, all weights and LoRA
    sizes: tuple[str, ...] = SIZES  # with --gpu
    write: bool = True  # keep the figures as JSON and put the table in the README


# --- the parent ----------------------------------------------------------------------------------


def main(args: Args) -> None:
    if not args.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited by the children
    if args.gpu and args.max_tokens == Args.max_tokens:
        args = replace(args, max_tokens=512, prompt_tokens=(200,), our_tokens=8192, trl_rows=8)
    cases = []
    for size in args.sizes if args.gpu else (args.shape,):
        with tempfile.TemporaryDirectory() as folder:
            dtype = "bfloat16" if args.gpu else "float32"
            weights = in_child(__file__, "make", folder=folder, size=size, dtype=dtype)["weights"]
            for tokens in args.prompt_tokens:
                for rank in (0, RANK) if args.gpu else (0,):
                    case = pair(args, folder, tokens, rank)
                    cases.append({"size": size, "weights": weights} | case)
        publish("vs_trl", cases, table, args.write)


def pair(args: Args, folder: str, prompt_tokens: int, lora_rank: int) -> dict[str, Any]:
    """One line of the table. Raises RuntimeError if the two sides did not do the same work."""
    work = {k: getattr(args, k) for k in ("num_prompts", "group_size", "max_tokens", "steps")}
    work |= {"prompt_tokens": prompt_tokens, "lora_rank": lora_rank}
    settings = work | {"folder": folder, "gpu": args.gpu}
    print(f"prompts of {prompt_tokens} tokens, LoRA rank {lora_rank}", flush=True)
    sides: dict[str, Callable[[], dict]] = {
        "picoRL": lambda: in_child(__file__, "picorl", tokens=args.our_tokens, **settings),
        "TRL": lambda: in_child(__file__, "trl", rows=args.trl_rows, **settings),
    }
    if args.gpu:
        sides["TRL, sleep"] = lambda: in_child(
            __file__, "trl", rows=args.trl_rows, sleep=True, **settings
        )
    found = in_turn(sides, args.rounds, "step_s")
    budget = args.num_prompts * args.group_size * args.max_tokens
    for name, answers in found.items():
        for answer in answers:
            if set(answer["sampled"]) != {budget} or answer["prompt_tokens"] != prompt_tokens:
                raise RuntimeError(f"{name} did other work: {answer}; asked for {budget} tokens")
    return work | {"budget": budget, "sides": found}


def table(cases: list[dict[str, Any]]) -> list[str]:
    """Markdown lines."""
    gpu = any("memory_gb" in case["sides"]["picoRL"][0] for case in cases)
    lines = [
        "| model | prompts | tokens a step | side | step, s | of it sampling, s | picoRL takes |"
        + (" peak in training, GB | peak, GB |" if gpu else " goal |"),
        "| --- | --- | --- | --- | --- | --- | --- | --- |" + (" --- |" if gpu else ""),
    ]
    for case in cases:
        ours = [answer["step_s"] for answer in case["sides"]["picoRL"]]
        trained = f"LoRA {case['lora_rank']}" if case["lora_rank"] else "all weights"
        for name, answers in case["sides"].items():
            times = [answer["step_s"] for answer in answers]
            share = ratios(ours, times)
            cells = [
                f"{case['size']}, {trained}", f"{case['num_prompts']} of {case['prompt_tokens']}",
                f"{case['budget']:,}", name, spread(times),
                spread([answer["sampling_s"] for answer in answers]),
                "" if name == "picoRL" else f"{spread(share)} of it",
            ]  # fmt: skip
            if gpu:
                peaks = [answer["memory_gb"] for answer in answers]
                cells += [spread([p.get(k, 0.0) for p in peaks], ".1f")
                          for k in ("training", "all")]  # fmt: skip
            else:
                goal = GOALS.get(case["prompt_tokens"])
                said = name != "picoRL" and goal
                cells.append(verdict(statistics.median(share), goal) if said else "")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


# --- the children --------------------------------------------------------------------------------


@dataclass
class Notes:
    """What a child notes down: where the time and the memory went."""

    phase: str = "training"  # all that isn't sampling
    sampling: list[float] = field(default_factory=list)  # seconds, of each step
    sampling_cpu: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # when a step ended
    cpu: list[float] = field(default_factory=list)  # the process's CPU seconds by then
    sampled: list[int] = field(default_factory=list)  # tokens, of each step
    prompt_tokens: int = 0
    peaks: dict[str, float] = field(default_factory=dict)  # GB on the device, by phase
    over: bool = False

    def step_ended(self, gpu: bool) -> None:
        if gpu:
            import torch

            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def around(self, call: Callable) -> Callable:
        """The call, its time noted as sampling."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.phase = "sampling"
            started, cpu = time.perf_counter(), time.process_time()
            result = call(*args, **kwargs)
            self.sampling.append(time.perf_counter() - started)
            self.sampling_cpu.append(time.process_time() - cpu)
            self.phase = "training"
            return result

        return timed

    def answer(self) -> dict[str, Any]:
        steps = [b - a for a, b in pairwise(self.ends)]
        found = {
            "step_s": statistics.median(steps),
            "sampling_s": statistics.median(self.sampling[1:]),
            "steps_s": steps,
            "steps_cpu_s": [b - a for a, b in pairwise(self.cpu)],
            "sampling_cpu_s": self.sampling_cpu[1:],
            "sampled": self.sampled,
            "prompt_tokens": self.prompt_tokens,
        }
        if self.peaks:
            found["memory_gb"] = self.peaks | {"all": max(self.peaks.values())}
        return found


@contextmanager
def memory_watched(notes: Notes) -> Iterator[None]:
    """Look at the device's memory in use, all allocators' together, a hundred times a second."""
    import torch

    def watch() -> None:
        while not notes.over:
            free, total = torch.cuda.mem_get_info()
            used = (total - free) / GB
            if notes.ends:  # the first step warms up
                notes.peaks[notes.phase] = max(notes.peaks.get(notes.phase, 0.0), used)
            time.sleep(0.01)

    if not torch.cuda.is_available():
        yield
        return
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        notes.over = True
        watcher.join()


def make(folder: str, size: str, dtype: str) -> dict[str, Any]:
    from workload import SHAPES, save_model

    return {"weights": save_model(folder, SHAPES[size], dtype)}


def picorl(
    folder: str, gpu: bool, tokens: int, lora_rank: int, num_prompts: int, group_size: int,
    prompt_tokens: int, max_tokens: int, steps: int,
) -> dict[str, Any]:  # fmt: skip
    """Steps of picoRL, as train.py takes them."""
    import workload  # noqa: F401 (registers its environment)

    import train
    from algorithms import grpo
    from core import config, run_dir
    from core.run import open_run

    env = f"speed:prompt_tokens={prompt_tokens}"
    cfg = config.resolve(train.Config(
        model_id=folder, env=(env,), num_updates=steps + 1, num_prompts=num_prompts,
        group_size=group_size, max_tokens=max_tokens, max_turns=1,
        max_model_len=prompt_tokens + max_tokens, max_tokens_per_micro_batch=tokens,
        lora_rank=lora_rank, sampler="vllm" if gpu else "torch", device="cuda" if gpu else "cpu",
        eval_num_tasks=0, microscope=0,
    ))  # fmt: skip
    cfg = replace(cfg, grpo=grpo.with_loss_type(cfg.grpo))
    config.validate(cfg)
    notes = Notes()
    play = train.play

    def watched(*args: Any) -> Any:
        played, kept = play(*args)
        notes.prompt_tokens = len(played[0].turns[0].prompt_ids)
        return played, kept

    train.play = notes.around(watched)
    try:
        with (
            tempfile.TemporaryDirectory() as runs,
            open_run(cfg, run_dir.config_to_dict(cfg), Path(runs), []) as run,
            memory_watched(notes),
        ):
            for update in range(1, steps + 2):
                record = train.play_and_learn(cfg, run, [env], update)
                run.log.log({"update": update} | record)
                notes.sampled.append(record["tokens/sampled"])
                assert record["tokens/trained"] == record["tokens/sampled"]
                notes.step_ended(gpu)
    finally:
        train.play = play
    return notes.answer()


def trl(
    folder: str, gpu: bool, rows: int, lora_rank: int, num_prompts: int, group_size: int,
    prompt_tokens: int, max_tokens: int, steps: int, sleep: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Steps of TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer
    from workload import prompt, reward

    notes = Notes()

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            notes.step_ended(gpu)

    def pay(completions: list, **rest: Any) -> list[float]:
        return [reward(completion[0]["content"]) for completion in completions]

    number = num_prompts * (steps + 1)
    data = Dataset.from_list([{"prompt": prompt(seed, prompt_tokens)} for seed in range(number)])
    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=folder, reward_funcs=pay, train_dataset=data, callbacks=[Watch()],
            args=trl_config(
                folder, out, gpu, rows, bool(lora_rank), num_prompts, group_size, prompt_tokens,
                max_tokens, steps, sleep,
            ),
            peft_config=trl_lora(lora_rank),
        )  # fmt: skip
        sample = trainer._generate_single_turn

        def watched(prompt_ids: list, *args: Any, **kwargs: Any) -> Any:
            found = sample(prompt_ids, *args, **kwargs)
            notes.prompt_tokens = len(prompt_ids[0])
            notes.sampled.append(sum(map(len, found[0])))
            return found

        trainer._generate_single_turn = notes.around(watched)
        with memory_watched(notes):
            trainer.train()
    return notes.answer()


def trl_config(
    folder: str, out: str, gpu: bool, rows: int, lora: bool, num_prompts: int, group_size: int,
    prompt_tokens: int, max_tokens: int, steps: int, sleep: bool,
) -> Any:  # fmt: skip
    """TRL's defaults but for the work that both sides share.

    Its default precision on a GPU is bfloat16 over float32 weights, as ours is; LoRA's frozen
    weights are bfloat16 on both sides.
    """
    from trl import GRPOConfig

    batch = num_prompts * group_size
    options: dict[str, Any] = {"use_cpu": True, "bf16": False}
    if gpu:
        options = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": sleep,
            "vllm_gpu_memory_utilization": vllm_share(folder, batch, prompt_tokens + max_tokens),
            "vllm_max_model_length": prompt_tokens + max_tokens,
        }  # fmt: skip
    return GRPOConfig(
        output_dir=out, max_steps=steps + 1, num_generations=group_size,
        per_device_train_batch_size=rows, gradient_accumulation_steps=batch // rows,
        max_completion_length=max_tokens, temperature=1.0, beta=0.0, num_iterations=1,
        gradient_checkpointing=False, learning_rate=2e-5 if lora else 1e-6, report_to="none",
        save_strategy="no", disable_tqdm=True,
        model_init_kwargs={"dtype": "bfloat16" if gpu and lora else "float32"}, **options,
    )  # fmt: skip


def vllm_share(folder: str, rows: int, length: int) -> float:
    """Of the GPU, for TRL's engine: its copy of the weights, all rows' cache and 4 GB to work in.

    Its default of 0.3 would count memory against it that it has no use for.
    """
    import json

    import torch

    config = json.loads(Path(folder, "config.json").read_text())
    keys = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    cache = 2 * 2 * keys * rows * (length + 16)
    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return (weights + 1.1 * cache + 4 * GB) / torch.cuda.mem_get_info()[1]


def trl_lora(rank: int) -> Any:
    """As core.model makes adapters; None without."""
    if rank == 0:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"
    )


PARTS = {"make": make, "picorl": picorl, "trl": trl}

if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not play_part(PARTS):
        main(tyro.cli(Args, description=__doc__))
