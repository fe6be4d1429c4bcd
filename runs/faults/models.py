"""Damages a folder with a small model, and loads it.

    python runs/faults/reproduce.py --only models --tries 50

A damaged model must be refused in one line, or load with finite weights and sample tokens that its
embedding has.
"""

import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from files import NO_FILES, replace_file  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from core.files import check_folder  # noqa: E402
from core.model import load_policy  # noqa: E402
from core.sampler import SamplingParams, TorchSampler  # noqa: E402
from core.tiny import write_tiny  # noqa: E402
from core.types import UsageError  # noqa: E402

Case = tuple[str, Callable[[], str]]  # a name, and what returns "" or says in a line what failed
FOREIGN: list[Any] = [
    None, True, -1, 0, 1, 2, 1.5, 1e308, math.nan, math.inf, "", "x", "</s>", "10", [], {}, [1],
    [None], [[1]], {"a": 1}, 10**21, 2**31, 700, "\ud800", "{{ 1/0 }}", "a" * 100_000,
]  # fmt: skip
# sizes that take all memory or an hour before a file could be compared with them
SIZES = ("layers", "size", "heads", "dim")


def cases(rng: random.Random) -> Iterator[Case]:
    """Tries without end."""
    with tempfile.TemporaryDirectory(prefix="picorl-models-") as root:
        good, folder = Path(root, "good"), Path(root, "damaged")
        good.mkdir()
        write_tiny("tiny-random", good, 0)
        files = sorted(path.name for path in good.glob("*.json"))
        while True:
            kind = rng.choice(["json", "json", "json", "weights", "weights", "bytes",
                               "no file"])  # fmt: skip
            if kind == "json":
                file = rng.choice(files)
                content = json.loads((good / file).read_text())
                names = [change(rng, content) for _ in range(rng.choice([1, 1, 2]))]
                name, data = f"{file} {names}", json.dumps(content).encode()
            elif kind == "bytes":
                file = rng.choice([path.name for path in good.iterdir() if path.is_file()])
                name, data = cut_or_flip(rng, file, (good / file).read_bytes())
            elif kind == "no file":
                file, data = rng.choice([path.name for path in good.iterdir()]), b""
                name = f"{kind}, a {rng.choice([*NO_FILES])}, as {file}"
            else:
                file, data = "model.safetensors", b""
                name = f"weights {rng.choice([*WEIGHTS])}"
            seed = rng.random()
            yield name[:200], partial(load, good, folder, file, data, name, seed)


def change(rng: random.Random, content: Any) -> str:
    """Changes one value somewhere in JSON; returns where and how."""
    path, inner = [], content
    while True:
        key = rng.choice([*inner]) if isinstance(inner, dict) else rng.randrange(len(inner))
        path.append(str(key))
        if isinstance(inner[key], (dict, list)) and inner[key] and rng.random() < 0.7:
            inner = inner[key]
            continue
        if rng.random() < 0.2:
            del inner[key]
            return f"without {'.'.join(path)}"
        value = rng.choice(FOREIGN)
        is_size = any(word in path[-1] for word in SIZES)
        inner[key] = rng.choice([0, -1, 2, 3, 100]) if is_size and type(value) is int else value
        return f"{'.'.join(path)}={inner[key]!r}"[:80]


def cut_or_flip(rng: random.Random, file: str, data: bytes) -> tuple[str, bytes]:
    """A file that ends early, or in which some bytes have other values."""
    place = rng.choice([0, 1, 8, rng.randrange(len(data)), len(data) - 1])
    if rng.random() < 0.5:
        return f"{file} cut at {place}", data[:place]
    noise = bytes(rng.randrange(256) for _ in range(4))
    return f"{file} with {noise!r} at {place}", data[:place] + noise + data[place + 4 :]


WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "nan": lambda w: torch.where(torch.arange(w.numel()).view(w.shape) == 7, torch.nan, w),
    "inf": lambda w: torch.where(torch.arange(w.numel()).view(w.shape) == 7, -torch.inf, w),
    "huge": lambda w: w * 1e38, "zero": lambda w: w * 0,
    "int8": lambda w: (w * 10).to(torch.int8), "int64": lambda w: (w * 10).to(torch.int64),
    "bool": lambda w: w > 0, "float16": lambda w: w.half(), "float64": lambda w: w.double(),
    "float8": lambda w: w.to(torch.float8_e4m3fn), "missing": lambda w: None,
    "flat": lambda w: w.reshape(-1), "empty": lambda w: w[:0],
    "longer": lambda w: torch.cat([w, w]),
}  # fmt: skip
REFUSED = ("nan", "inf", "int8", "int64", "bool", "missing", "empty", "longer")


def load(good: Path, folder: Path, file: str, data: bytes, name: str, seed: float) -> str:
    """What is wrong with how the model is loaded whose `file` contains `data`."""
    rng = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    kind = name.partition("weights ")[2]
    if kind:
        weights = load_file(good / file)
        chosen = rng.choice(sorted(weights))
        changed = WEIGHTS[kind](weights.pop(chosen))
        if changed is not None:
            weights[chosen] = changed.contiguous()
        save_file(weights, folder / file, metadata={"format": "pt"})
    elif name.startswith("no file"):
        replace_file(folder / file, name.split()[3].rstrip(","))
    else:
        (folder / file).write_bytes(data)
    options: dict[str, Any] = {"lora_rank": 2} if rng.random() < 0.3 else {}
    try:
        check_folder(folder)
        policy = load_policy(str(folder), device="cpu", **options)
        if name.startswith("no file"):
            return "loaded"
        if kind in REFUSED:
            return f"loaded with {kind} in {chosen}"
        prompt = policy.tokenizer.encode("a b c", add_special_tokens=False)
        params = SamplingParams(4, temperature=1.0, seed=1)
        TorchSampler(policy).sample([prompt] * 2, params)
    except UsageError as error:
        return "" if "\n" not in str(error) and len(str(error)) < 500 else f"message {error!s:.300}"
    parameters = policy.model.named_parameters()
    bad = [name for name, weight in parameters if not weight.isfinite().all()]
    return f"not finite: {bad[0]}" if bad else ""
