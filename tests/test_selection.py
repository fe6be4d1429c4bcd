"""Which rollouts are trained on: filtering by the spread of returns."""

import pytest

from core.config import Config
from core.metrics import rollout_metrics
from core.selection import groups_with_spread, with_spread
from core.types import Rollout, Turn


def played(*rewards, tokens=2, group=0, agent="player", env="e"):
    """A rollout with a turn for each reward; all but the last turn have one token."""
    lengths = [1] * (len(rewards) - 1) + [tokens]
    turns = [Turn([k], [5] * n, [-0.5] * n, "stop", float(r))
             for k, (r, n) in enumerate(zip(rewards, lengths, strict=True))]  # fmt: skip
    return Rollout(env, agent, 0, group, [], turns)


@pytest.mark.parametrize(
    ("settings", "rollouts", "differ"),
    [
        ({}, [played(0), played(1)], True),
        ({}, [played(0, 1), played(1, 0)], False),
        ({"gamma": 0.9}, [played(0, 1), played(1, 0)], True),  # 0.9 and 1
        ({"credit": "turn"}, [played(0, 1), played(1, 0)], True),  # turn 1: 1 and 0
        # equal but for rounding
        ({"credit": "turn", "gamma": 0.9}, [played(1, 0.1, 1) for _ in range(7)], False),
        ({}, [played(0.1, 0.2), played(0.3, 0)], False),  # not the same numbers in float32
        ({}, [played(1, 1e-6), played(1, 0)], True),
        ({}, [played(1), played(1)], False),
    ],
)
def test_the_spread_is_that_of_the_returns_that_advantages_compare(settings, rollouts, differ):
    cfg = Config(**({"credit": "episode"} | settings))
    assert groups_with_spread(cfg, rollouts) == ({0} if differ else set())
    assert with_spread(cfg, rollouts) == (rollouts if differ else [])
    assert rollout_metrics(cfg, rollouts)["groups/zero_std_fraction"] == 1 - differ


def test_in_self_play_a_task_is_kept_if_the_returns_of_one_agent_differ():
    x = [played(1.0, agent="X", group=0), played(1.0, agent="X", group=0)]
    o = [played(0.0, agent="O", group=1), played(-1.0, agent="O", group=1)]
    # X and O have different returns, but each agent is compared with itself
    assert len(with_spread(Config(), [x[0], o[0], x[1], o[1]])) == 4
    assert with_spread(Config(), [x[0], o[0], x[1], played(0.0, agent="O", group=1)]) == []
