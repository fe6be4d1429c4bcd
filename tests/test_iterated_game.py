"""Iterated games: the matrix, the rules of the opponents, the best play, and two agents at once."""

import time
from itertools import product

import pytest

from core.types import UsageError
from environments.base import MultiAgentEnv
from environments.iterated_game import AgainstRule, SelfPlay, iterated_game
from environments.registry import make

C, D = "cooperate", "defect"
FIXED = ["tit_for_tat", "always_cooperate", "always_defect"]
MATRICES = ["3/3_0/5_5/0_1/1", "4/4_0/3_3/0_3/3", "3/3_1/4_4/1_0/0", "2/1_-1/0_0/0.5_1/2"]


def choice(word):
    return f"<choice>{word}</choice>"


def play(env, words, seed=0):
    env.reset(seed)
    return [env.step(choice(word)) for word in words]


def follow(env, seed, hasty=False):
    env.reset(seed)
    steps = []
    while not steps or not steps[-1].done:
        text = env.demonstrate(hasty)
        assert text == env.demonstrate(hasty) and len(text) < 64
        steps.append(env.step(text))
    return steps


def test_constructor_makes_one_player_or_two():
    assert isinstance(make("iterated_game"), AgainstRule)
    assert isinstance(make("iterated_game:opponent=self,rounds=3"), SelfPlay)
    assert issubclass(SelfPlay, MultiAgentEnv)


def test_opening_tells_the_matrix_the_rule_and_the_rounds():
    (message,) = iterated_game().reset(0)
    assert message["content"] == (
        "Each round you and another cooperate (C) or defect (D). Points you/other: CC 3/3, CD 0/5, "
        "DC 5/0, DD 1/1. The other cooperates first, then copies you. Think first. End with "
        "<choice>cooperate</choice> or defect.\nRound 1 of 5."
    )


def test_tit_for_tat_copies_and_a_round_pays_points_over_the_largest():
    steps = play(iterated_game(), [C, D, D, C, C])
    assert [step.reward for step in steps] == [0.6, 1.0, 0.2, 0.0, 0.6]
    assert steps[1].message["content"] == "You defect, other cooperate. Round 3 of 5."
    assert steps[-1].message is None and steps[-1].done
    assert steps[-1].info == {"correct": False, "cooperation": 0.6}


@pytest.mark.parametrize(
    "opponent, reward", [("always_cooperate", [0.6, 1.0]), ("always_defect", [0.0, 0.2])]
)
def test_constant_opponents_do_not_answer(opponent, reward):
    assert [s.reward for s in play(iterated_game(opponent, rounds=2), [C, D])] == reward


@pytest.mark.parametrize("payoffs", MATRICES)
@pytest.mark.parametrize("opponent", FIXED)
def test_correct_is_exactly_the_largest_return_of_all_ways_to_play(opponent, payoffs):
    env = iterated_game(opponent, payoffs, rounds=4)
    ways = [play(env, words) for words in product((C, D), repeat=4)]
    returns = [sum(step.reward for step in steps) for steps in ways]
    for steps, total in zip(ways, returns, strict=True):
        assert steps[-1].info["correct"] == (total == pytest.approx(max(returns)))
    best = follow(env, 0)
    assert sum(step.reward for step in best) == pytest.approx(max(returns))
    assert best[-1].info["correct"]


def test_best_play_against_tit_for_tat_cooperates_until_the_last_round():
    steps = follow(iterated_game(), 0)
    assert [step.reward for step in steps] == [0.6, 0.6, 0.6, 0.6, 1.0]
    assert steps[-1].info == {"correct": True, "cooperation": 0.8}


def test_coin_is_best_met_by_the_best_reply_whatever_it_shows():
    env = iterated_game("random")
    for seed in range(50):
        assert follow(env, seed)[-1].info == {"correct": True, "cooperation": 0.0}
        assert not play(env, [D, D, C, D, D], seed)[-1].info["correct"]
    faces = [step.reward for seed in range(200) for step in play(env, [D] * 5, seed)]
    assert set(faces) == {1.0, 0.2} and 400 < faces.count(1.0) < 600


def test_coin_shows_the_same_whatever_the_player_does():
    env = iterated_game("random")
    for seed in range(20):
        kind, mean = play(env, [C] * 5, seed), play(env, [D] * 5, seed)
        assert [s.reward == 0.6 for s in kind] == [s.reward == 1.0 for s in mean]


def test_random_end_is_seeded_unannounced_and_as_long_as_it_should_be():
    env = iterated_game(end="random", continue_probability=0.8)
    lengths = [len(follow(env, seed)) for seed in range(1000)]
    assert lengths[:50] == [len(follow(env, seed, hasty=True)) for seed in range(50)]
    assert 4.5 < sum(lengths) / 1000 < 5.5  # 1 / (1 - 0.8)
    opening = env.reset(0)[0]["content"]
    assert opening.endswith("Round 1.") and "with chance 0.8." in opening
    assert max(lengths) <= 50
    assert len(follow(iterated_game(end="random", continue_probability=1.0), 0)) == 50
    assert len(follow(iterated_game(end="random", continue_probability=0.0), 0)) == 1


def test_random_end_keeps_cooperation_worth_it_only_if_the_future_is_likely():
    # against tit for tat: 3 for ever, 3 / (1 - p), or 5 once and 1 for ever, 5 + p / (1 - p),
    # or 5 and 0 by turns, 5 / (1 - p²): cooperation is best from p = 2/3 on
    for p, first in ((0.6, D), (0.7, C)):
        env = iterated_game(end="random", continue_probability=p)
        env.reset(0)
        assert env.demonstrate().endswith(choice(first))
        other = iterated_game(end="random", continue_probability=p)
        other.reset(0)
        other.step(choice(C if first == D else D))
        assert not other.correct


def test_demonstration_adds_up():
    env = iterated_game()
    env.reset(0)
    assert env.demonstrate() == "C 3+14=17, D 5+11=16 <choice>cooperate</choice>"
    assert {env.demonstrate(hasty=True) for env.own in [[C] * n for n in range(20)]} == {
        choice(C),
        choice(D),
    }


def test_demonstrations_solve_every_seed_and_messages_are_short():
    for opponent, end in product([*FIXED, "random"], ["fixed", "random"]):
        env = iterated_game(opponent, end=end)
        for seed in range(100):
            assert len(env.reset(seed)[0]["content"]) < 300
            steps = follow(env, seed)
            assert steps[-1].info["correct"]
            assert all(len(s.message["content"]) < 120 for s in steps[:-1])


def test_same_seed_is_the_same_episode_whatever_was_played_before():
    env = iterated_game("random", end="random")
    first = follow(env, 3, hasty=True)
    follow(env, 4)
    assert follow(env, 3, hasty=True) == first
    assert follow(iterated_game("random", end="random"), 3, hasty=True) == first
    assert len({len(follow(env, seed)) for seed in range(20)}) > 3


@pytest.mark.parametrize(
    "text, reward",
    [
        ("<choice>defect</choice> no, <choice>cooperate</choice>", 0.6),
        ('it may defect, so {"choice": "Defect"}', 1.0),
        ("If I defect it will, so I cooperate.", 0.6),
        ("<choice>stay</choice>", -0.1),
        ("he defects", -0.1),
    ],
)
def test_choice_may_follow_reasoning(text, reward):
    env = iterated_game()
    env.reset(0)
    assert env.step(text).reward == reward


def test_third_unreadable_response_ends_the_episode_and_a_reset_forgives():
    env = iterated_game()
    for _ in range(2):
        env.reset(0)
        steps = [env.step("hm") for _ in range(3)]
        assert [(s.reward, s.done) for s in steps] == [(-0.1, False), (-0.1, False), (-1.0, True)]
    env.reset(0)
    env.step("hm")
    assert [env.step(choice(w)).info["correct"] for w in (C, C, C, C, D)][-1]  # play alone counts


def both(env, row, column):
    return env.step({"row": choice(row), "column": choice(column)})


def test_self_play_pays_each_agent_its_own_number_of_the_cell():
    env = iterated_game("self", "2/1_-1/0_0/4_1/2", rounds=2)
    opening = env.reset(0)
    assert list(opening) == ["row", "column"]
    assert "CC 2/1, CD -1/0, DC 0/4, DD 1/2" in opening["row"][0]["content"]
    assert "CC 1/2, CD 4/0, DC 0/-1, DD 2/1" in opening["column"][0]["content"]
    steps = both(env, D, C)
    assert (steps["row"].reward, steps["column"].reward) == (0.0, 1.0)
    assert steps["row"].message["content"] == "You defect, other cooperate. Round 2 of 2."
    assert steps["column"].message["content"] == "You cooperate, other defect. Round 2 of 2."
    steps = both(env, C, D)
    assert (steps["row"].reward, steps["column"].reward) == (-0.25, 0.0)
    assert all(step.done and not step.info["correct"] for step in steps.values())


def test_self_play_is_correct_when_the_pair_has_the_most_in_every_round():
    env = iterated_game("self", rounds=3)
    for words, correct in (((C, C, C), True), ((C, D, C), False), ((C, C, D), False)):
        env.reset(0)
        steps = [both(env, word, C) for word in words]
        assert [s["row"].info["correct"] for s in steps] == [False, False, correct]
        assert steps[-1]["row"].info["correct"] == steps[-1]["column"].info["correct"]


def test_self_play_waits_for_the_agent_that_has_to_repeat():
    env = iterated_game("self", rounds=1)
    env.reset(0)
    steps = env.step({"row": choice(D), "column": "hm"})
    assert list(steps) == ["column"] and steps["column"].reward == -0.1 and steps["column"].message
    steps = env.step({"column": choice(C)})
    assert (steps["row"].reward, steps["column"].reward) == (1.0, 0.0)
    assert steps["row"].done and steps["column"].done


def test_self_play_ends_for_both_when_one_cannot_be_read():
    env = iterated_game("self")
    env.reset(0)
    assert set(env.step({"row": "hm", "column": "hm"})) == {"row", "column"}
    assert set(env.step({"row": "hm", "column": choice(C)})) == {"row"}
    steps = env.step({"row": "hm"})
    assert {a: (s.reward, s.done, s.message) for a, s in steps.items()} == {
        "row": (-1.0, True, None),
        "column": (0.0, True, None),
    }
    assert not any(step.info["correct"] for step in steps.values())
    assert env.choices["row"] == []
    env.reset(0)
    assert both(env, C, C)["row"].reward == 0.6


def test_self_play_has_a_seeded_random_end():
    env = iterated_game("self", end="random")

    def length(seed):
        env.reset(seed)
        return next(n for n in range(1, 51) if both(env, C, C)["row"].done)

    lengths = [length(seed) for seed in range(100)]
    assert lengths == [length(seed) for seed in range(100)] and len(set(lengths)) > 5


@pytest.mark.parametrize(
    "options",
    [
        "opponent=me",
        "end=never",
        "rounds=0",
        "rounds=51",
        "continue_probability=1.5",
        "continue_probability=nan",
        "payoffs=3/3_0/5_5/0",
        "payoffs=3/3/0/5/5/0/1/1",
        "payoffs=3/3_0/5_5/0_1/x",
        "payoffs=3/3_0/5_5/0_1/inf",
        "payoffs=0/0_0/0_0/0_-1/0",
    ],
)
def test_bad_option_is_one_line(options):
    with pytest.raises(UsageError) as error:
        make(f"iterated_game:{options}")
    assert "\n" not in str(error.value)


HOSTILE = ["", "x" * 100_000, "<choice>" * 20_000, '{"choice":' * 20_000, "\ud800", "[" * 99_999]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_refused_quickly(text):
    env, pair = iterated_game(), iterated_game("self")
    env.reset(0), pair.reset(0)
    started = time.perf_counter()
    assert env.step(text).reward == -0.1
    assert pair.step({"row": text, "column": text})["row"].reward == -0.1
    assert time.perf_counter() - started < 1
