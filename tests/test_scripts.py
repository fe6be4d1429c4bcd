"""The scripts under runs/ start: those with options print their help, the others are imported."""

import os
import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from core.loading import load_policy
from core.optimizer import make_optimizer
from environments.plumbing.registry import ENVIRONMENTS

ROOT = Path(__file__).parent.parent
SCRIPTS = [f for f in sorted(ROOT.glob("runs/**/*.py")) if "__main__" in f.read_text()]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_script_starts(file, monkeypatch, capsys):
    if file.stem == "verifiers_task":
        pytest.importorskip("verifiers")
    has_help = bool(re.search(r"argparse\.|tyro\.", file.read_text()))
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(sys, "path", [str(file.parent), *sys.path])
    modules, environments = set(sys.modules), dict(ENVIRONMENTS)
    try:
        with pytest.raises(SystemExit) if has_help else nullcontext() as end:
            runpy.run_path(str(file), run_name="__main__" if has_help else "imported")
    finally:  # a script may register an environment, and its neighbours have common names
        ENVIRONMENTS.clear()
        ENVIRONMENTS.update(environments)
        for name in set(sys.modules) - modules:
            if str(ROOT / "runs") in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    if has_help:
        assert end.value.code in (0, None) and "usage" in capsys.readouterr().out.lower()


def test_a_random_model_of_the_benchmarks_never_ends_a_completion(tmp_path, monkeypatch):
    """Not even after steps of ten times the learning rate of the benchmarks."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "runs/benchmarks"), *sys.path])
    from workload import SHAPES, save_model

    save_model(str(tmp_path), SHAPES["minute"], "float16")
    policy = load_policy(str(tmp_path), device="cpu", dtype="float16")
    optimizer, ends, steps = make_optimizer(policy, lr=2e-5), list[float](), 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        ids = torch.randint(0, 256, (1, 40), generator=generator)
        logits = policy.to_logits(policy.hidden_states(ids)[0, :-1])
        logprobs = logits.log_softmax(-1)
        advantages = torch.randn(39, generator=generator)
        sampled = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)
        optimizer.backward(-(advantages * sampled).sum())
        steps += optimizer.clip_and_step(1.0)[1]  # in float16 the first ones overflow
        ends.append(logprobs[:, policy.causal_lm.config.eos_token_id].max().item())
    assert steps > 80 and logits.isfinite().all() and max(ends) < -100
