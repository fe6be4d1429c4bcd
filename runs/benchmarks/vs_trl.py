"""A training step of picoRL and of TRL's GRPOTrainer: sampling, training pass, optimizer step.

    python runs/benchmarks/vs_trl.py         # on the CPU, 10 minutes
    python runs/benchmarks/vs_trl.py --model smollm2 --num-prompts 2 --steps 1   # 40 minutes
    python runs/benchmarks/vs_trl.py --rounds 1 --steps 1 --no-write

Both sides load the same model, use the same prompts, sample the same number of tokens (checked) and
train once on all of them, in float32, without a reference model or gradient checkpointing. picoRL
runs `train.main`, including its metrics and rollout files, without --microscope: a pass after the
step for the report, which TRL does not have. TRL runs `GRPOTrainer.train` with its
other defaults. Neither saves a checkpoint. A step lasts from the end of one step to the end of the
next; the first step of a process is left out. Linux. gpu_session.py runs both sides on a GPU, TRL
with vLLM in its process.
"""

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tyro
from pairs import (
    Rounds,
    alternate,
    cells_of_pair,
    in_child,
    of,
    publish,
    run_child,
    spread,
    status,
)
from record import markdown
from workload import PROMPT_TOKENS, WORK

GOALS = {  # maximum of picoRL's time / TRL's time, by model and prompt length
    "4M": {50: 0.55, 200: 0.3},
    "smollm2": {50: 0.6, 200: 0.3},
}
OUR_TOKENS, TRL_ROWS = 2048, 16  # of a micro-batch: padded tokens of picoRL, completions of TRL
GB = 2**30


@dataclass
class Args(Rounds):
    """What to measure."""

    model: Literal["4M", "smollm2"] = "4M"
    num_prompts: int = WORK["num_prompts"]
    steps: int = 4  # measured in each process, after one that is not


def main(args: Args) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited by the children
    with tempfile.TemporaryDirectory() as folder:
        weights = in_child(__file__, "make", folder=folder, model=args.model)["weights"]
        cases = [{"size": args.model, "weights": weights} | pair(args, folder, tokens)
                 for tokens in PROMPT_TOKENS]  # fmt: skip
    # the results of the pretrained model have their own file and table
    name = "vs_trl_smollm2" if args.model == "smollm2" else "vs_trl"
    publish(name, cases, table, args.write)


def pair(args: Args, folder: str, prompt_tokens: int) -> dict[str, Any]:
    """Measures one row of the table. Raises RuntimeError if the sides did different work."""
    work = WORK | {"num_prompts": args.num_prompts, "steps": args.steps, "lora_rank": 0,
                   "prompt_tokens": prompt_tokens}  # fmt: skip
    tokenizer = "smollm2" if args.model == "smollm2" else "tiny"
    settings = work | {"folder": folder, "gpu": False, "tokenizer": tokenizer}
    print(f"prompts of {prompt_tokens} tokens", flush=True)
    sides = {
        "picoRL": partial(in_child, __file__, "picorl", **settings, tokens=OUR_TOKENS),
        "TRL": partial(in_child, __file__, "trl", **settings, rows=TRL_ROWS),
    }
    results = alternate(sides, args.rounds, "step_s")
    budget = args.num_prompts * work["group_size"] * work["max_tokens"]
    for name, answers in results.items():
        for answer in answers:
            if set(answer["sampled"]) != {budget} or answer["prompt_tokens"] != prompt_tokens:
                raise RuntimeError(f"{name} sampled other tokens than {budget}: {answer}")
    return work | {"budget": budget, "sides": results}


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per case and side, as Markdown."""
    rows = []
    for case in cases:
        goal = GOALS[case["size"]][case["prompt_tokens"]]
        *times, ratio, met = cells_of_pair(case["sides"], "step_s", ".2f", goal)
        for number, (name, answers) in enumerate(case["sides"].items()):
            rows.append([
                f"{case['size']}, all weights", f"{case['num_prompts']} of {case['prompt_tokens']}",
                f"{case['budget']:,}", name, times[number], spread(of(answers, "sampling_s")),
                *([ratio, met] if name == "TRL" else ["", ""]),
                speed(case["budget"], answers), spread(of(answers, "resident_gb"), ".1f"),
            ])  # fmt: skip
    return markdown("model | prompts | tokens per step | side | step, s | sampling, s | "
                    "picoRL / TRL | goal | tokens/s | peak, GB", rows)  # fmt: skip


def speed(tokens: int, answers: list[dict[str, Any]]) -> str:
    """Tokens per second while sampling, and in the rest of the step; medians."""
    sampling = [tokens / answer["sampling_s"] for answer in answers]
    rest = [tokens / (answer["step_s"] - answer["sampling_s"]) for answer in answers]
    return f"{statistics.median(sampling):,.0f} sampled, {statistics.median(rest):,.0f} trained"


# --- child processes -----------------------------------------------------------------------------


@dataclass
class StepTimer:
    """The times, tokens and peak memory of the steps of one process."""

    gpu: bool
    phase: str = "training"  # everything but sampling
    sampling: list[float] = field(default_factory=list)  # seconds, one per step
    ends: list[float] = field(default_factory=list)  # time at the end of each step
    sampled: list[int] = field(default_factory=list)  # tokens, one per step
    prompt_tokens: int = 0
    peaks: dict[str, float] = field(default_factory=dict)  # GB on the device, by phase
    done: bool = False

    def step_ended(self) -> None:
        if self.gpu:
            import torch

            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def time_sampling(self, sample: Callable) -> Callable:
        """Wraps the function that samples; its time counts as sampling."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.phase = "sampling"
            started = time.perf_counter()
            result = sample(*args, **kwargs)
            self.sampling.append(time.perf_counter() - started)
            self.phase = "training"
            return result

        return timed

    @contextmanager
    def watch_memory(self) -> Iterator[None]:
        """Samples the memory in use on the GPU, of all allocators, a hundred times a second."""
        import torch

        def watch() -> None:
            while not self.done:
                free, total = torch.cuda.mem_get_info()
                if self.ends:  # the first step warms up
                    used = (total - free) / GB
                    self.peaks[self.phase] = max(self.peaks.get(self.phase, 0.0), used)
                time.sleep(0.01)

        watcher = threading.Thread(target=watch, daemon=True)
        if self.gpu:
            watcher.start()
        try:
            yield
        finally:
            self.done = True
            if self.gpu:
                watcher.join()

    def answer(self) -> dict[str, Any]:
        steps = [b - a for a, b in pairwise(self.ends)]
        answer = {
            "step_s": statistics.median(steps),
            "sampling_s": statistics.median(self.sampling[1:]),
            "steps_s": steps,
            "sampled": self.sampled,
            "prompt_tokens": self.prompt_tokens,
            "resident_gb": status("VmHWM") / GB,
        }
        if self.peaks:
            answer["memory_gb"] = self.peaks | {"all": max(self.peaks.values())}
        return answer


def make(folder: str, model: str) -> dict[str, Any]:
    from workload import SHAPES, save_model, save_smollm2

    saved = save_smollm2(folder) if model == "smollm2" else save_model(folder, SHAPES[model])
    return {"weights": saved}


def picorl(
    folder: str, gpu: bool, tokens: int, lora_rank: int, num_prompts: int, group_size: int,
    prompt_tokens: int, max_tokens: int, steps: int, tokenizer: str = "tiny",
) -> dict[str, Any]:  # fmt: skip
    """Measures steps of picoRL, in a run of train.py."""
    import workload  # noqa: F401 (registers its environment)

    import train
    from core.loop.run import Run

    timer = StepTimer(gpu)
    collect, log, save = train.collect_rollouts, Run.log, Run.save

    def collect_rollouts(*args: Any) -> Any:
        sampled, kept = collect(*args)
        timer.prompt_tokens = len(sampled[0].turns[0].prompt_ids)
        return sampled, kept

    def end_step(run: Run, update: int, metrics: dict[str, Any], rollouts: list) -> bool:
        stop = log(run, update, metrics, rollouts)
        if update > 0:
            assert metrics["tokens/trained"] == metrics["tokens/sampled"]
            timer.sampled.append(metrics["tokens/sampled"])
            timer.step_ended()
        return stop

    train.collect_rollouts = timer.time_sampling(collect_rollouts)
    Run.log, Run.save = end_step, lambda run: False
    here = os.getcwd()
    try:
        with tempfile.TemporaryDirectory() as empty, timer.watch_memory():
            os.chdir(empty)  # for runs/
            env = f"speed:prompt_tokens={prompt_tokens},tokenizer={tokenizer}"
            train.main(train.Config(
                model_id=folder, env=(env,),
                num_updates=steps + 1, num_prompts=num_prompts, group_size=group_size,
                max_tokens=max_tokens, max_turns=1, max_model_len=prompt_tokens + max_tokens,
                max_tokens_per_micro_batch=tokens, lora_rank=lora_rank, sft_steps=0,
                sampler="vllm" if gpu else "torch", device="cuda" if gpu else "cpu",
                eval_num_tasks=0, save_every=0, microscope=0,
            ))  # fmt: skip
    finally:
        os.chdir(here)
        train.collect_rollouts, Run.log, Run.save = collect, log, save
    return timer.answer()


def trl(
    folder: str, gpu: bool, rows: int, lora_rank: int, num_prompts: int, group_size: int,
    prompt_tokens: int, max_tokens: int, steps: int, tokenizer: str = "tiny", sleep: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Measures steps of TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer
    from workload import prompt, reward

    timer = StepTimer(gpu)

    class EndOfStep(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            timer.step_ended()

    def rewards(completions: list, **rest: Any) -> list[float]:
        return [reward(completion[0]["content"]) for completion in completions]

    number = num_prompts * (steps + 1)
    prompts = [prompt(seed, prompt_tokens, tokenizer) for seed in range(number)]
    data = Dataset.from_list([{"prompt": messages} for messages in prompts])
    with tempfile.TemporaryDirectory() as out:
        engine = engine_options(folder, gpu, bool(lora_rank), num_prompts * group_size,
                                prompt_tokens + max_tokens, sleep)  # fmt: skip
        trainer = GRPOTrainer(
            model=folder, reward_funcs=rewards, train_dataset=data, callbacks=[EndOfStep()],
            args=trl_config(
                out, rows, num_prompts, group_size, max_tokens, steps + 1,
                learning_rate=2e-5 if lora_rank else 1e-6, **engine,
            ),
            peft_config=trl_lora(lora_rank),
        )  # fmt: skip
        sample = trainer._generate_single_turn

        def generate(prompt_ids: list, *args: Any, **kwargs: Any) -> Any:
            result = sample(prompt_ids, *args, **kwargs)
            timer.prompt_tokens = len(prompt_ids[0])
            timer.sampled.append(sum(map(len, result[0])))
            return result

        trainer._generate_single_turn = timer.time_sampling(generate)
        with timer.watch_memory():
            trainer.train()
    return timer.answer()


def trl_config(
    out: str, rows: int, num_prompts: int, group_size: int, max_tokens: int, steps: int,
    **options: Any,
) -> Any:  # fmt: skip
    """Returns TRL's defaults, except for the workload and for what saves memory, not time."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=out, max_steps=steps, num_generations=group_size,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=num_prompts * group_size // rows,
        max_completion_length=max_tokens, beta=0.0, num_iterations=1,
        gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
        **options,
    )  # fmt: skip


def engine_options(
    folder: str, gpu: bool, lora: bool, batch: int, length: int, sleep: bool
) -> dict[str, Any]:
    """Returns TRL's options for the CPU in float32, or for a GPU with vLLM in its process.

    On a GPU both TRL and picoRL use bfloat16 compute over float32 weights; the frozen weights of
    LoRA are bfloat16 on both sides.
    """
    if not gpu:
        return {"use_cpu": True, "bf16": False, "model_init_kwargs": {"dtype": "float32"}}
    return {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": sleep,
        "vllm_gpu_memory_utilization": vllm_share(folder, batch, length),
        "vllm_max_model_length": length,
        "model_init_kwargs": {"dtype": "bfloat16" if lora else "float32"},
    }  # fmt: skip


def vllm_share(folder: str, rows: int, length: int) -> float:
    """Returns the share of GPU memory for TRL's engine: weights, cache of all rows, and 4 GB.

    TRL's default of 0.3 would reserve memory that the engine does not use.
    """
    import json

    import torch

    config = json.loads(Path(folder, "config.json").read_text())
    keys = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    cache = 2 * 2 * keys * rows * (length + 16)
    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return (weights + 1.1 * cache + 4 * GB) / torch.cuda.mem_get_info()[1]


def trl_lora(rank: int) -> Any:
    """Returns the same adapters as core.policy makes; None for rank 0."""
    if rank == 0:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"
    )


PARTS = {"make": make, "picorl": picorl, "trl": trl}

if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not run_child(PARTS):
        main(tyro.cli(Args, description=__doc__))
