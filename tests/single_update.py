"""Runs one update of train.main on given rollouts, with the real loop, batch and optimizer."""

import copy
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch

import train
from core.algorithm import load_algorithm
from core.files import checkpoint
from core.loop import before
from core.loop.open import prepare
from core.loop.run import Run
from core.metrics import UpdateStats
from core.optimizer import make_optimizer


def single_update(cfg, policy, optimizer, rollouts, update=1, reference=None):
    """The metrics of update number `update`, trained on `rollouts` instead of sampled ones."""
    logged = {}

    class OneUpdate(Run):
        def updates(self):
            self.probe.begin(self.optimizer)
            yield update, UpdateStats(self.cfg)

        def log(self, number, metrics, sampled):
            logged.update(metrics)

        def save(self):
            pass

    @contextmanager
    def open_run(cfg):
        cfg, info = prepare(cfg)
        unused = dict.fromkeys(("collector", "folder", "run_log", "display", "interrupt"))
        yield OneUpdate(
            cfg, info, load_algorithm(cfg), policy, optimizer, **unused,
            sampler=SimpleNamespace(sync=lambda: None),
            progress=checkpoint.START | {"update": update - 1},
        )  # fmt: skip

    cfg = replace(cfg, num_updates=update, sft_steps=0, eval_num_tasks=0)
    with (
        patch.multiple(train, open_run=open_run, play=lambda *_: (rollouts, rollouts)),
        patch.object(before, "freeze_reference", lambda *_: reference),
    ):
        assert train.main(cfg) == 0
    return {name: x for name, x in logged.items() if not name.startswith("time/")}


def gradients_of_update(cfg, policy, rollouts, later=None, reference=None):
    """The gradient of each step of an update, flat, weights by name and then those of the value
    head; and the metrics. After each step the model gets the weights `later`, a state dict."""
    gradients, optimizer = [], make_optimizer(policy, 1e-3)

    def step():
        parameters = [p for _, p in sorted(policy.model.named_parameters())]
        if policy.value_head:
            parameters += policy.value_head.parameters()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
        if later:
            policy.model.load_state_dict(later)

    optimizer.step = step
    if reference:  # a state dict as well
        weights = reference
        reference = replace(policy, model=copy.deepcopy(policy.model), value_head=None)
        reference.model.load_state_dict(weights)
    return gradients, single_update(cfg, policy, optimizer, rollouts, reference=reference)


def moved(weights, distance, generator):
    """A state dict, each weight that much of a normal draw away from where it was."""
    noise = (torch.randn(w.shape, generator=generator) for w in weights.values())
    return {name: w + distance * next(noise) for name, w in weights.items()}
