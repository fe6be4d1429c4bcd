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

import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import torch  # noqa: E402
import tyro  # noqa: E402
from record import commit, machine, markdown, spread, versions, write_table  # noqa: E402
from workload import PROMPT_TOKENS, SHAPES, WORK, prompt, reward, save_model, save_smollm2  # noqa: E402

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
GOALS = {  # maximum of picoRL's time / TRL's time, by model and prompt length
    "4M": {50: 0.55, 200: 0.3},
    "smollm2": {50: 0.6, 200: 0.3},
}
SIDES = {  # of a micro-batch: padded tokens of picoRL, completions of TRL
    "picoRL": {"part": "picorl", "tokens": 2048},
    "TRL": {"part": "trl", "rows": 16},
}
ANSWER = "answer: "  # begins the line in which a child prints what it found
GB = 2**30


@dataclass
class Args:
    """What to measure."""

    model: Literal["4M", "smollm2"] = "4M"
    num_prompts: int = WORK["num_prompts"]
    steps: int = 4  # measured in each process, after one that is not
    rounds: int = 5  # of each side, in turn
    write: bool = True  # save the results as JSON and write the table into README.md


def main(args: Args) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited by the children
    with tempfile.TemporaryDirectory() as folder:
        weights = (save_smollm2(folder) if args.model == "smollm2"
                   else save_model(folder, SHAPES[args.model]))  # fmt: skip
        cases = [{"size": args.model, "weights": weights} | pair(args, folder, tokens)
                 for tokens in PROMPT_TOKENS]  # fmt: skip
    print("\n".join(["", *table(cases)]), flush=True)
    if args.write:
        # the results of the pretrained model have their own file and table
        publish("vs_trl_smollm2" if args.model == "smollm2" else "vs_trl", cases)


def pair(args: Args, folder: str, prompt_tokens: int) -> dict[str, Any]:
    """Measures both sides in turn, A B A B .., for one row of the table.

    Raises RuntimeError if the sides did different work.
    """
    work = WORK | {"num_prompts": args.num_prompts, "steps": args.steps, "lora_rank": 0,
                   "prompt_tokens": prompt_tokens}  # fmt: skip
    tokenizer = "smollm2" if args.model == "smollm2" else "tiny"
    settings = work | {"folder": folder, "gpu": False, "tokenizer": tokenizer}
    budget = args.num_prompts * work["group_size"] * work["max_tokens"]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for turn in range(args.rounds):
        for name, side in SIDES.items():
            answer = in_child(**settings, **side)
            if set(answer["sampled"]) != {budget} or answer["prompt_tokens"] != prompt_tokens:
                raise RuntimeError(f"{name} sampled other tokens than {budget}: {answer}")
            results[name].append(answer)
            print(f"prompts of {prompt_tokens} tokens, round {turn + 1} of {args.rounds}: "
                  f"{name:6} {answer['step_s']:.4g} s", flush=True)  # fmt: skip
    return work | {"budget": budget, "sides": results}


def in_child(**settings: Any) -> dict[str, Any]:
    """Runs a part of PARTS in a fresh process and returns its result; RuntimeError if it fails."""
    command = [sys.executable, __file__, "--child", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if done.returncode or not answers:
        raise RuntimeError(f"exit code {done.returncode} of {settings}: {done.stderr[-2000:]}")
    return json.loads(answers[-1].removeprefix(ANSWER))


def publish(name: str, cases: list[dict[str, Any]]) -> None:
    """Saves the results, and writes their table into README.md."""
    folder = HERE / "speed"
    command = shlex.join(["python", f"runs/benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    result = {
        "machine": machine(), "commit": commit(), "command": command,
        "threads": torch.get_num_threads(), "versions": versions(), "cases": cases,
    }  # fmt: skip
    (folder / f"{name}-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    used = ", ".join(f"{package} {number}" for package, number in versions().items())
    made = f"`{command}` at commit {commit()} on {machine()}; {torch.get_num_threads()} threads; "
    write_table(folder, [f"{made}{used}.", "", *table(cases)], name)


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per case and side, as Markdown."""
    rows = []
    for case in cases:
        goal = GOALS[case["size"]][case["prompt_tokens"]]
        ours, theirs = ([answer["step_s"] for answer in answers]
                        for answers in case["sides"].values())  # fmt: skip
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]  # pairs have the same load
        met = "met" if statistics.median(ratios) <= goal else "missed"
        for name, answers in case["sides"].items():
            keys = ("step_s", "sampling_s", "resident_gb")
            steps, sampling, peak = ([answer[key] for answer in answers] for key in keys)
            rows.append([
                f"{case['size']}, all weights", f"{case['num_prompts']} of {case['prompt_tokens']}",
                f"{case['budget']:,}", name, spread(steps), spread(sampling),
                *([spread(ratios), f"at most {goal:g}: {met}"] if name == "TRL" else ["", ""]),
                speed(case["budget"], answers), spread(peak, ".1f"),
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
            "resident_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        if self.peaks:
            answer["memory_gb"] = self.peaks | {"all": max(self.peaks.values())}
        return answer


def picorl(
    folder: str, gpu: bool, tokens: int, lora_rank: int, num_prompts: int, group_size: int,
    prompt_tokens: int, max_tokens: int, steps: int, tokenizer: str = "tiny",
) -> dict[str, Any]:  # fmt: skip
    """Measures steps of picoRL, in a run of train.py."""
    import train
    from core.loop import play
    from core.loop.run import Run

    timer = StepTimer(gpu)
    collect, log = play.collect, Run.log

    def collect_rollouts(*args: Any) -> Any:
        played, canary = collect(*args)
        timer.prompt_tokens = len(played.sampled[0].turns[0].prompt_ids)
        return played, canary

    def end_step(run: Run, update: int, metrics: dict[str, Any], rollouts: list) -> bool:
        stop = log(run, update, metrics, rollouts)
        if update > 0:
            assert metrics["tokens/trained"] == metrics["tokens/sampled"]
            timer.sampled.append(metrics["tokens/sampled"])
            timer.step_ended()
        return stop

    play.collect = timer.time_sampling(collect_rollouts)
    Run.log, Run.save = end_step, lambda run: False
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
        os.chdir(HERE)
    return timer.answer()


def trl(
    folder: str, gpu: bool, rows: int, lora_rank: int, num_prompts: int, group_size: int,
    prompt_tokens: int, max_tokens: int, steps: int, tokenizer: str = "tiny", sleep: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Measures steps of TRL's GRPOTrainer.

    It has its defaults, except for the workload and for what saves memory, not time, and the same
    adapters as core.policy makes.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

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
            args=GRPOConfig(
                output_dir=out, max_steps=steps + 1, num_generations=group_size,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=num_prompts * group_size // rows,
                max_completion_length=max_tokens, beta=0.0, num_iterations=1,
                gradient_checkpointing=False, report_to="none", save_strategy="no",
                disable_tqdm=True, learning_rate=2e-5 if lora_rank else 1e-6, **engine,
            ),
            peft_config=LoraConfig(
                task_type="CAUSAL_LM", r=lora_rank, lora_alpha=2 * lora_rank,
                target_modules="all-linear",
            ) if lora_rank else None,
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
    config = json.loads(Path(folder, "config.json").read_text())
    keys = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    cache = 2 * 2 * keys * rows * (length + 16)
    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return (weights + 1.1 * cache + 4 * GB) / torch.cuda.mem_get_info()[1]


PARTS = {"picorl": picorl, "trl": trl}

if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if sys.argv[1:2] == ["--child"]:
        settings = json.loads(sys.argv[2])
        print(ANSWER + json.dumps(PARTS[settings.pop("part")](**settings)), flush=True)
    else:
        main(tyro.cli(Args, description=__doc__))
