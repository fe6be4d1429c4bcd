"""Runs one update of train.main on given rollouts, with the real loop, batch and optimizer."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import train
from core.run import checkpoint


def single_update(cfg, policy, optimizer, rollouts, update=1, reference=None):
    """The metrics of update number `update`, trained on `rollouts` instead of sampled ones."""
    logged = {}
    run = SimpleNamespace(
        policy=policy,
        optimizer=optimizer,
        sampler=SimpleNamespace(sync=lambda: None),
        progress=checkpoint.START.copy(),
        next_update=update,
        updates=lambda: [update],
        started_at=0.0,
        sampled_at=0.0,
        stopped=False,
        folder=None,
        say=print,
        log=lambda number, metrics, sampled: logged.update(metrics),
        save=lambda: None,
    )

    @contextmanager
    def open_run(cfg, algorithm):
        yield run

    cfg = replace(cfg, num_updates=update, sft_steps=0, eval_num_tasks=0)
    with patch.multiple(
        train,
        open_run=open_run,
        collect_rollouts=lambda cfg, run, update: (rollouts, rollouts),
        freeze_reference=lambda *args: reference,
        probe_peak_memory=lambda *args: None,
    ):
        assert train.main(cfg) == 0
    return {name: x for name, x in logged.items() if not name.startswith("time/")}
