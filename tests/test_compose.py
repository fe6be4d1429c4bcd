"""compose: what is held out, what the two kinds of demonstration show, and what is rewarded."""

import itertools

import pytest

from environments.base import DEMO_SEEDS, EVAL_SEEDS, is_held_out
from environments.compose import Compose, apply, is_unambiguous, is_unseen


@pytest.mark.parametrize("pairs", ["seen", "unseen", "all"])
def test_words_and_pairs_of_the_evaluation_never_occur_in_training(pairs):
    env, drawn = Compose(pairs=pairs), set()
    for seed in range(200):
        for start in (0, DEMO_SEEDS.start, EVAL_SEEDS.start):
            (message,) = env.reset(start + seed)
            word, names = message["content"].split(":")
            assert is_held_out(word) == (start == EVAL_SEEDS.start)
            assert len(names) == 2 and is_unambiguous(names, word)
            drawn |= set(itertools.pairwise(names))
    assert len(drawn) == {"seen": 30, "unseen": 13, "all": 43}[pairs]
    wanted = {"seen": {False}, "unseen": {True}, "all": {False, True}}[pairs]
    assert {is_unseen(*pair) for pair in drawn} == wanted
    assert {is_unseen(*reversed(pair)) for pair in drawn} == wanted


def test_a_careless_demonstration_never_shows_the_answer_to_a_composition():
    env, lengths, depths = Compose(depth=4, mixed=True), set(), set()
    for seed in range(DEMO_SEEDS.start, DEMO_SEEDS.start + 300):
        env.reset(seed)
        shown = env.demonstrate(hasty=True)
        names, words = shown.split()[::2], shown.split()[1::2]
        assert names[0] == env.names[0]
        assert words == [apply(names[: i + 1], env.word) for i in range(len(names))]
        assert len(env.names) == 1 or env.step(shown).reward == 0
        lengths.add(len(names))
        depths.add(len(env.names))
    assert lengths == {1, 2, 3} and depths == {1, 2, 3, 4}


def test_the_answer_alone_is_rewarded():
    env, worked = Compose(depth=2, steps=False), Compose(depth=2)
    env.reset(seed=3), worked.reset(seed=3)
    assert env.demonstrate() == env.answer == worked.answer
    assert worked.demonstrate().endswith(f" {env.answer}")
    assert worked.step(worked.demonstrate()).info["steps"] == 2
    for right in (env.answer, f"R zzzz L {env.answer} ", f"so: {env.answer}"):
        assert env.step(right).reward == 1 and env.step(right).info["correct"]
    for wrong in ("", env.word, f"a{env.answer}", f"{env.answer}.", f"{env.answer} R {env.word}"):
        assert env.step(wrong).reward == 0, wrong
