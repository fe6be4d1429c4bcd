"""Runs one update of train.main on given rollouts, with the real loop, batch and optimizer."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import train
from core.loop.run import Run
from core.run import checkpoint


def single_update(cfg, policy, optimizer, rollouts, update=1, reference=None):
    """The metrics of update number `update`, trained on `rollouts` instead of sampled ones."""
    logged = {}

    class OneUpdate(Run):
        def updates(self):
            yield update

        def log(self, number, metrics, sampled):
            logged.update(metrics)

        def save(self):
            pass

    @contextmanager
    def open_run(cfg, algorithm):
        sampler = SimpleNamespace(sync=lambda: None)
        evaluator = SimpleNamespace(evaluate=lambda update: {})
        yield OneUpdate(
            cfg, policy, optimizer, collector=None, sampler=sampler, evaluator=evaluator,
            outputs=SimpleNamespace(folder=None), display=None, interrupt=None,
            progress=checkpoint.START.copy(),
        )  # fmt: skip

    cfg = replace(cfg, num_updates=update, sft_steps=0, eval_num_tasks=0)
    with patch.multiple(
        train,
        open_run=open_run,
        probe_peak_memory=lambda *args: None,
        collect_rollouts=lambda cfg, run, update: (rollouts, rollouts),
        freeze_reference=lambda *args: reference,
    ):
        assert train.main(cfg) == 0
    return {name: x for name, x in logged.items() if not name.startswith("time/")}
