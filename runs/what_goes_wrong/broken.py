"""train.py with one mistake put in on purpose, of those that raise no error.

    python runs/what_goes_wrong/broken.py wrong_clip --num-epochs 4

Each is a few lines, as it would stand in a real system; flags are those of train.py.
"""

import inspect
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import train
from algorithms import grpo
from core import run_log, sampler
from core.rollouts import AgentState, RolloutCollector
from core.types import Completion


def wrong_clip() -> None:
    """The larger of the two products instead of the smaller: one word."""
    source = inspect.getsource(grpo.compute_loss)
    assert source.count("torch.minimum") == 1
    exec(source.replace("torch.minimum", "torch.maximum"), vars(grpo))


def retokenised() -> None:
    """The text is tokenised again, and the token that ended it, which is no text, is lost."""
    add_completion = RolloutCollector._add_completion

    def add_retokenised(self: RolloutCollector, agent: AgentState, completion: Completion) -> None:
        ids = self.policy.tokenizer.encode(completion.text.strip(), add_special_tokens=False)
        ids = ids or completion.token_ids
        logprobs = [*completion.logprobs, *[0.0] * len(ids)][: len(ids)]
        retokenised = Completion(ids, logprobs, completion.text, completion.finish_reason)
        add_completion(self, agent, retokenised)

    RolloutCollector._add_completion = add_retokenised


def merged_adapter() -> None:
    """The adapter is merged into the bfloat16 weights to sample, and taken out again to train."""
    first: dict = {}
    drifts: list[float] = []

    def sync(torch_sampler: sampler.TorchSampler) -> None:
        model = torch_sampler.policy.model
        base = {n: p for n, p in model.named_parameters() if n.endswith("base_layer.weight")}
        first.update({n: p.detach().clone() for n, p in base.items() if n not in first})
        model.merge_adapter()
        model.unmerge_adapter()
        moved = sum(float((p - first[n]).float().norm() ** 2) for n, p in base.items())
        whole = sum(float(first[n].float().norm() ** 2) for n in base)
        drifts.append((moved / whole) ** 0.5)

    log = run_log.RunLog.log

    def log_drift(self: run_log.RunLog, record: dict) -> None:
        log(self, record | ({"base/drift": drifts[-1]} if drifts else {}))

    sampler.TorchSampler.sync = sync
    run_log.RunLog.log = log_drift


MISTAKES = {f.__name__: f for f in (wrong_clip, retokenised, merged_adapter)}

if __name__ == "__main__":
    name, *flags = sys.argv[1:] or [""]
    if name not in MISTAKES:
        sys.exit(f"broken.py: which mistake? {json.dumps(list(MISTAKES))}, then flags of train.py")
    MISTAKES[name]()
    sys.exit(train.run_command(flags))
