"""Gymnasium in words: how actions are read, what is paid, what counts as solved, the players."""

import sys
import time

import pytest

pytest.importorskip("gymnasium")

import environments.adapters.gymnasium  # noqa: F401  registers
from core.types import UsageError
from environments.adapters.gymnasium import (
    Gymnasium,
    extract_action,
    format_observation,
    system_prompt,
)
from environments.adapters.gymnasium_players import GAMES, best_actions
from environments.registry import make

KNOWN = list(GAMES)


def play(env, seed, hasty=False):
    """Follow the demonstrations; returns (return, last step, all that was said)."""
    said = [env.reset(seed)[0]["content"]]
    total, done = 0.0, False
    while not done:
        response = env.demonstrate(hasty)
        assert env.demonstrate(hasty) == response
        step = env.step(response)
        total, done = total + step.reward, step.done
        said += [response, step.message and step.message["content"]]
    return total, step, said


@pytest.mark.parametrize(
    "id, response, action",
    [
        ("CartPole-v1", "left", 0),
        ("CartPole-v1", "not left, it falls: Right.", 1),
        ("CartPole-v1", '{"action": "left"} is better than right', 0),
        ("CartPole-v1", '{"action": 1}', 1),
        ("CartPole-v1", "<action>right</action> left", 1),
        ("CartPole-v1", "<action>0</action>", 0),
        ("CartPole-v1", " 1\n", 1),
        ("CartPole-v1", "a is 0.1 and v is 1", None),  # numbers of the observation
        ("CartPole-v1", "leftish", None),
        ("CartPole-v1", '{"action": 2}', None),
        ("CartPole-v1", '{"action": true}', None),
        ("CartPole-v1", '{"action": 1.0}', None),
        ("Blackjack-v1", "17 against 10: Stick", 0),
        ("Blackjack-v1", "I hit", 1),
        ("Taxi-v4", "dropoff", 5),
        ("Taxi-v4", "action 5", None),
        ("MountainCar-v0", "none", 1),
        ("FrozenLake-v1", "", None),
    ],
)
def test_the_last_action_named_counts(id, response, action):
    assert extract_action(GAMES[id], response) == action


def test_the_observations_are_short_lines():
    assert format_observation(GAMES["CartPole-v1"], (0.01, 0.22, -0.031, -0.3)) == (
        "x 0.0 v 0.2 a -0.03 w -0.3"
    )
    assert format_observation(GAMES["CartPole-v1"], (-0.01, 0, -0.001, -0.01)) == (
        "x 0.0 v 0.0 a 0.00 w 0.0"
    )
    assert format_observation(GAMES["Blackjack-v1"], (14, 10, 0)) == "you 14 dealer 10 ace no"
    assert format_observation(GAMES["FrozenLake-v1"], 6) == "row 1 column 2"
    # Gymnasium's own example: taxi row 3 column 1, passenger place 2, goal 0
    assert format_observation(GAMES["Taxi-v4"], 328) == "taxi 3,1 passenger Y to R"
    assert format_observation(GAMES["MountainCar-v0"], (-0.523, -0.0071)) == "x -0.52 v -0.7"


@pytest.mark.parametrize("id", KNOWN)
def test_the_rules_come_first_and_later_messages_are_short(id):
    _, _, said = play(Gymnasium(id), 1)
    assert said[0].startswith(system_prompt(GAMES[id]) + "\n") and len(said[0]) <= 250
    assert all(len(text) <= 40 for text in said[1:] if text)


@pytest.mark.parametrize("id", KNOWN)
@pytest.mark.parametrize("hasty", [False, True])
def test_same_seed_is_the_same_episode(id, hasty):
    env = Gymnasium(id)
    first = play(env, 2_000_000_011, hasty)
    assert play(env, 6, hasty)[2] != first[2]
    assert play(env, 2_000_000_011, hasty) == first == play(Gymnasium(id), 2_000_000_011, hasty)


def test_rewards_are_passed_through_scaled_and_summed_over_repeats():
    env = make("gymnasium:id=CartPole-v1,max_steps=10,repeat=3,scale=0.5")
    env.reset(0)
    steps = [env.step(env.demonstrate()) for _ in range(4)]
    assert [step.reward for step in steps] == [1.5, 1.5, 1.5, 0.5]
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[-1].message is None and steps[-1].info == {"correct": True, "steps": 10}


def test_without_memory_each_message_stands_alone_with_the_rules():
    env, reminded = Gymnasium("CartPole-v1", memory=False), Gymnasium("CartPole-v1")
    (opening,) = env.reset(3)
    assert reminded.reset(3) == [opening]
    rules, _ = opening["content"].split("\n")
    alone, appended = env.step("left"), reminded.step("left")
    assert (alone.fresh, appended.fresh) == (True, False)
    assert alone.message["content"] == f"{rules}\n{appended.message['content']}"
    assert not env.step("up?").fresh  # a hint needs what it speaks of


def test_a_pole_that_falls_is_not_correct():
    env = Gymnasium("CartPole-v1")
    env.reset(0)
    step = env.step("left")
    while not step.done:
        step = env.step("left")
    assert step.info["correct"] is False and step.info["steps"] < 20


def test_cartpole_is_balanced_to_its_limit_on_20_seeds():
    for repeat in (1, 3):
        env = Gymnasium("CartPole-v1", repeat=repeat)
        for seed in range(20):
            total, step, _ = play(env, seed)
            assert total == 500 and step.info["correct"] is True


def test_basic_strategy_returns_what_it_should():
    env = Gymnasium("Blackjack-v1")
    hands = [play(env, seed)[:2] for seed in range(20_000)]
    assert sum(total for total, _ in hands) / 20_000 == pytest.approx(-0.045, abs=0.02)
    assert all(step.info["correct"] == (total > 0) for total, step in hands)


def test_mountain_car_and_taxi_always_arrive():
    for id, least in (("MountainCar-v0", -140), ("Taxi-v4", 3)):
        env = Gymnasium(id)
        for seed in range(100):
            total, step, _ = play(env, seed)
            assert step.info["correct"] is True and total >= least


def test_the_frozen_lake_is_crossed_three_times_in_four():
    # the best policy arrives with 0.74 in 100 steps (0.82 without a limit)
    env = Gymnasium("FrozenLake-v1")
    results = [play(env, seed)[:2] for seed in range(1000)]
    assert sum(total for total, _ in results) / 1000 == pytest.approx(0.74, abs=0.05)
    assert all(step.info["correct"] == (total == 1) for total, step in results)
    assert best_actions("FrozenLake-v1")[14] == 1  # beside the goal: down, so as not to slip off


def test_a_hasty_player_is_legal_and_worse():
    for id in KNOWN:
        env = Gymnasium(id, max_steps=100)
        hasty = [play(env, seed, hasty=True) for seed in range(40)]
        assert all("invalid" not in step.info for _, step, _ in hasty)
        good = [play(env, seed)[0] for seed in range(40)]
        assert sum(total for total, _, _ in hasty) < sum(good) or id == "MountainCar-v0"


def test_two_unreadable_actions_are_forgiven_and_change_nothing():
    env = Gymnasium("CartPole-v1", scale=2)
    opening = env.reset(3)
    now = env.demonstrate()
    first, second = env.step("?"), env.step("")
    assert [first.reward, second.reward] == [-0.1, -0.1] and not second.done
    assert second.message["content"] == "End with left or right."
    assert env.demonstrate() == now
    third = env.step("up")
    assert (third.reward, third.done, third.message) == (-2, True, None)
    assert third.info == {"correct": False, "invalid": True, "steps": 0}
    assert env.reset(3) == opening and env.step("?").reward == -0.1  # retries start anew


@pytest.mark.parametrize("id", ["MountainCar-v0", "Taxi-v4", "Acrobot-v1"])
def test_giving_up_is_no_way_out_where_steps_cost(id):
    env = Gymnasium(id)
    env.reset(0)
    rewards = [env.step("?").reward for _ in range(3)]
    assert sum(rewards) < -env.env.spec.max_episode_steps


def test_another_environment_is_told_in_numbers():
    env = make("gymnasium:id=Acrobot-v1,max_steps=2")
    text = env.reset(0)[0]["content"]
    head, line = text.split("\n")
    assert head == "Acrobot-v1. End with 0 or 1 or 2."
    assert len(line.split()) == 6 and all(number[-3] == "." for number in line.split())
    assert env.demonstrate() is None and env.demonstrate(hasty=True) in env.game.actions
    assert env.step("after 0.5 I take 2").reward == -1
    step = env.step("1")
    assert step.done and step.info == {"correct": False, "steps": 2}


def test_actions_may_start_at_one_and_observations_be_nested():
    import gymnasium
    import numpy as np
    from gymnasium import spaces

    class Odd(gymnasium.Env):
        action_space = spaces.Discrete(2, start=1)
        observation_space = spaces.Dict(
            {
                "at": spaces.Box(-1, 1, (2,)),
                "say": spaces.Text(5),
                "pair": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)]),
            }
        )

        def reset(self, *, seed=None, options=None):
            seen = np.array([-0.001, 0.5], np.float32)
            return {"at": seen, "say": "hi", "pair": (2, np.array([0, 1], np.int8))}, {}

        def step(self, action):
            return self.reset()[0], float(action), True, False, {}

    if "PicorlOdd-v0" not in gymnasium.registry:
        gymnasium.register("PicorlOdd-v0", Odd)
    env = Gymnasium("PicorlOdd-v0")
    assert env.reset(0)[0]["content"].endswith("\nat 0.00 0.50 say hi pair 2 0 1")
    assert env.step('{"action": 0}').info["invalid"]
    step = env.step('{"action": 2}')
    assert step.reward == 2 and step.done and step.info["correct"] is True


@pytest.mark.parametrize(
    "options, message",
    [
        ("id=Nope-v0", "can't make 'Nope-v0'"),
        ("id=nowhere:Nope-v0", "can't make"),
        ("id=", "can't make"),
        ("id=Pendulum-v1", "no discrete actions"),
        ("repeat=0", "repeat 1 or more"),
        ("max_steps=-1", "max_steps"),
        ("repeat=x", "integer"),
    ],
)
def test_a_bad_option_is_one_clear_line(options, message):
    with pytest.raises(UsageError, match=message) as error:
        make(f"gymnasium:{options}")
    assert "\n" not in str(error.value)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UsageError, match=r"needs gymnasium: pip install -e \"\.\[envs\]\""):
        make("gymnasium")


HOSTILE = ["", "left" * 25_000, "{" * 100_000, '{"action":' * 10_000, "<action>" * 12_500,
           "\ud800", "\0" * 1000, " " * 100_000, '{"action": [[]]}',
           '{"action": ' + "9" * 5000 + "}", "1" * 100_000, "٣"]  # fmt: skip


@pytest.mark.parametrize("index", range(len(HOSTILE)))
@pytest.mark.parametrize("id", ["CartPole-v1", "Acrobot-v1"])
def test_a_hostile_response_is_invalid_and_fast(id, index):
    env = Gymnasium(id)
    env.reset(0)
    started = time.perf_counter()
    assert env.step(HOSTILE[index]).info["invalid"]
    assert time.perf_counter() - started < 0.5  # seconds; about 5 ms on a quiet machine
