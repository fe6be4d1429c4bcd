"""The iterated game: tit for tat, optimal play, and two agents at once."""

from itertools import product

import pytest

from environments.iterated_game import iterated_game

C, D = "cooperate", "defect"


def choice(word):
    return f"<choice>{word}</choice>"


def play(env, choices):
    env.reset(0)
    return [env.step(choice(word)) for word in choices]


def test_tit_for_tat_copies_and_the_reward_is_the_points_over_the_maximum():
    steps = play(iterated_game(), [C, D, D, C, C])
    assert [step.reward for step in steps] == [0.6, 1.0, 0.2, 0.0, 0.6]
    assert steps[1].message["content"] == "You defect, other cooperate. Round 3 of 5."
    assert steps[-1].message is None and steps[-1].done
    assert steps[-1].info == {"correct": False, "cooperation": 0.6}


def test_correct_means_the_maximum_return_of_all_sequences():
    env = iterated_game(rounds=4)
    episodes = [play(env, choices) for choices in product((C, D), repeat=4)]
    returns = [sum(step.reward for step in steps) for steps in episodes]
    for steps, total in zip(episodes, returns, strict=True):
        assert steps[-1].info["correct"] == (total == pytest.approx(max(returns)))
    env.reset(0)
    assert sum(env.step(env.demonstrate()).reward for _ in range(4)) == pytest.approx(max(returns))


def test_self_play_rewards_each_agent_and_waits_for_the_one_that_repeats_its_choice():
    env = iterated_game("self", rounds=2)
    opening = env.reset(0)
    assert "CC 3/3, CD 0/5, DC 5/0, DD 1/1" in opening["row"][0]["content"]
    assert opening["column"] == opening["row"]
    assert env.step({"row": "hm", "column": "hm"}).keys() == {"row", "column"}
    steps = env.step({"row": choice(D), "column": "hm"})
    assert list(steps) == ["column"] and steps["column"].reward == -0.1 and steps["column"].message
    steps = env.step({"column": choice(C)})
    assert (steps["row"].reward, steps["column"].reward) == (1.0, 0.0)
    assert steps["row"].message["content"] == "You defect, other cooperate. Round 2 of 2."
    assert steps["column"].message["content"] == "You cooperate, other defect. Round 2 of 2."
    steps = env.step({"row": choice(C), "column": choice(D)})
    assert (steps["row"].reward, steps["column"].reward) == (0.0, 1.0)
    assert all(step.done and not step.info["correct"] for step in steps.values())
