"""Token traces hold what the update computed for each token."""

import math
from pathlib import Path

import pytest
import torch
from conftest import metrics_of

from algorithms import ppo
from core.algorithm import load_algorithm
from core.batching import to_tokens
from core.config import Config
from core.files.run_log import read_records
from core.metrics import UpdateStats
from core.report.token_traces import _movement, choose_groups, loss_terms, pieces, trace_tokens
from core.scoring import score_tokens
from core.types import Rollout, Turn
from environments.base import Env, Step
from environments.plumbing import registry

SHORT = """--sft-steps 0 --num-updates 1 --num-prompts 2 --group-size 4
    --eval-num-tasks 0 --max-tokens 6 --lr 1e-3 --max-tokens-per-micro-batch 300""".split()


class Even(Env):
    """Rewards responses of even length, in three turns with contexts of their own."""

    def reset(self, seed):
        self.left = 3
        return [{"role": "user", "content": "?"}]

    def step(self, response):
        self.left -= 1
        message = {"role": "user", "content": "again"} if self.left else None
        return Step(message, float(len(response) % 2 == 0), self.left == 0, fresh=True)


def rollouts(run):
    return read_records(Path(f"runs/{run}/rollouts.jsonl"))


def test_traces_cover_every_token_and_the_step_follows_the_advantages(command, monkeypatch):
    monkeypatch.setitem(registry.ENVIRONMENTS, "even", Even)
    for name, budget in (("traced", 4096), ("plain", 0)):
        flags = ["--env", "even", "--microscope", budget, "--run-name", name]
        assert command(*SHORT, *flags)[0] == 0
    traced, plain = (metrics_of(f"runs/{name}")[-1] for name in ("traced", "plain"))
    assert traced.keys() - plain.keys() == {"update/moved", "update/direction"}
    assert plain.items() <= traced.items()
    assert not any("token_traces" in row for row in rollouts("plain"))
    gained = 0.0
    for row in rollouts("traced"):
        spoken = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert len(row["token_traces"]) == len(spoken) == len(row["rewards"]) == 3
        for trace, text in zip(row["token_traces"], spoken, strict=True):
            assert "".join(trace["text"]).removesuffix("<|end|>") == text
            assert len({len(x) for x in trace.values() if isinstance(x, list)}) == 1
            columns = (trace[k] for k in ("advantage", "sampler", "trainer", "after"))
            for a, sampler, trainer, after in zip(*columns, strict=True):
                assert trainer == pytest.approx(sampler, abs=2e-4)
                assert sampler <= 0 and after <= 0
                gained += a * (after - trainer)
        assert len({a for trace in row["token_traces"] for a in trace["advantage"]}) == 1
    assert gained > 0


def test_tokens_drawn_from_some_ids_move_only_as_far_as_the_weights(command):
    flags = "--env letter_counting:difficulty=2 --top-p 0.5 --run-name a".split()
    short = [{"6": "24", "1e-3": "1e-9"}.get(word, word) for word in SHORT]
    assert command(*short, *flags)[0] == 0
    assert metrics_of("runs/a")[-1]["update/moved"] < 1e-4


def test_whole_groups_within_the_budget_are_traced_and_at_least_one():
    one = [Rollout("e", "p", 0, g, turns=[Turn([1], [2] * n, [0.0] * n, "stop")])
           for g, n in ((0, 3), (1, 4), (0, 3), (1, 4), (2, 1))]  # fmt: skip
    assert choose_groups(one, 14) == {0, 1, 2, 3}
    assert choose_groups(one, 13) == {0, 2}
    assert choose_groups(one, 1) == {0, 2}
    assert choose_groups(one, 100) == {0, 1, 2, 3, 4}
    one[3].turns[0].reward = 1.0  # its group is the only one with different returns: it comes first
    assert choose_groups(one, 1) == {1, 3}


def test_each_column_has_the_numbers_of_its_own_tokens(policy):
    """Of three rollouts only the last two, which differ, are within the budget."""
    rollouts = [Rollout("e", "p", 0, g, turns=[Turn([1], [5, 6], [-1.0 - i, -1.5 - i], "stop", r)])
                for i, (g, r) in enumerate([(0, 0.0), (1, 0.0), (1, 1.0)])]  # fmt: skip
    batch = to_tokens(rollouts)
    batch.old_logprobs, batch.advantages = batch.sampler_logprobs - 4, torch.arange(6.0)
    found = trace_tokens(policy, Config(microscope=4, temperature=0.5), batch)
    assert "token_traces" not in rollouts[0].for_log and "update/moved" in found
    [trace] = rollouts[2].for_log["token_traces"]
    assert trace["sampler"] == [-3.0, -3.5] and trace["trainer"] == [-7.0, -7.5]
    after = score_tokens(policy, batch, 0.5)["logprobs"][4:].tolist()
    assert trace["advantage"] == [4.0, 5.0] and trace["after"] == pytest.approx(after, abs=1e-4)


@pytest.mark.parametrize("target_kl", [0.0, 0.1])
def test_terms_are_those_of_the_last_step_that_was_taken(target_kl):
    """ρ is 2 for both tokens: the clip drops the first, and not the second, whose A is negative."""
    cfg = Config(algo="ppo", options=ppo.Options(target_kl=target_kl, value_clip=0.0))
    batch = to_tokens([Rollout("e", "p", 0, 0, turns=[Turn([1], [2], [0.0], "stop", r)])
                       for r in (1.0, 0.0)])  # fmt: skip
    old = torch.tensor([0.25, 0.25]).log()
    batch.add({"old_logprobs": old, "advantages": torch.tensor([1.0, -1.0]),
               "in_loss": torch.ones(2) > 0, "old_values": torch.tensor([0.5, 0.5]),
               "value_targets": torch.tensor([1.0, 0.5])})  # fmt: skip
    stats, weights = UpdateStats(cfg), torch.tensor([1.0, 0.5])
    for probability in (0.25, 0.5, 0.75)[: 3 if target_kl else 2]:
        seen = {"number": torch.arange(2), "logprobs": torch.full((2,), probability).log(),
                "values": torch.tensor([0.6, 0.5]), "token_weights": torch.tensor([0.5, 0.5]),
                "importance_weights": weights}  # fmt: skip
        stats.passes.append((stats.step, seen))
        stats.step += 1
    stats.approx_kl = 0.2  # of the last step
    found = loss_terms(cfg, batch, torch.ones(2) > 0, load_algorithm(cfg), stats)
    expected = {
        "step": [2, 2], "now": [-0.693147, -0.693147], "ratio": [2, 2], "clipped_ratio": [1.2, 1.2],
        "token_weight": [0.5, 0.5], "weight": [1, 0.5], "surrogate": [1.2, -2],
        "push": [0, math.nan],  # of the second: as the surrogate has it, w ρ A
        "value": [0.6, 0.5], "old_value": [0.5, 0.5], "target": [1, 0.5],
        "value_term": [0.5 * 0.4**2 / 2, 0],
    }  # fmt: skip
    assert {name: x.tolist() for name, x in found.items()} == {
        name: pytest.approx(x, abs=1e-6, nan_ok=True) for name, x in expected.items()
    }


def test_a_character_of_several_tokens_appears_at_its_last_token(policy):
    ids = policy.tokenizer.encode("aé≠b", add_special_tokens=False)
    found = pieces(policy.tokenizer, ids)
    assert len(found) == len(ids) and "".join(found) == "aé≠b"
    assert found == ["a", "", "é", "", "", "≠", "b"]


def test_the_direction_of_an_update_is_the_correlation_within_groups():
    """Two groups that moved by other amounts: in each the better rollout became likelier."""
    batch = to_tokens([
        Rollout("e", "p", 0, group, turns=[Turn([1], [2], [0.0], "stop", reward)])
        for group, reward in ((0, 1.0), (0, 0.0), (1, 1.0), (1, 0.0))
    ])  # fmt: skip
    batch.old_logprobs = torch.zeros(4)
    found = _movement(batch, [0, 1, 2, 3], torch.tensor([1.0, 0.0, 5.0, 4.0]))
    assert found == {"update/moved": 2.5, "update/direction": pytest.approx(1.0)}
    found = _movement(batch, [0, 1, 2, 3], torch.tensor([0.0, 1.0, 4.0, 5.0]))
    assert found["update/direction"] == pytest.approx(-1.0)
    # of the second group alone: 1 and 3
    found = _movement(batch, [2, 3], torch.tensor([9.0, 7.0, 1.0, 3.0]))
    assert found == {"update/moved": 2.0, "update/direction": pytest.approx(-1.0)}


def test_what_moved_is_added_up_over_all_sequences_of_a_rollout():
    """The better rollout has two contexts, whose tokens moved by 1 and 3; the other's by 2."""
    better = [Turn([1], [2], [0.0], "stop", 0.5), Turn([5], [2], [0.0], "stop", 0.5)]
    worse = [Turn([1], [3], [0.0], "stop", 0.0)]
    batch = to_tokens([Rollout("e", "p", 0, 0, turns=turns) for turns in (better, worse)])
    batch.old_logprobs = torch.zeros(3)
    found = _movement(batch, [0, 1], torch.tensor([1.0, 3.0, 2.0]))
    assert found == {"update/moved": 2.0, "update/direction": pytest.approx(1.0)}
