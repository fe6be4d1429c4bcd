"""Sorting names over several turns: the lists, the marks of new names, the rewards."""

import pytest

from environments.alphabet_sort import AlphabetSort

ARRIVALS = [[("Dora", "Engel"), ("Ben", "Adler")], [("Leo", "Dahl")]]


def env_with(by_last=True, **options):
    env = AlphabetSort(turns=2, **options)
    env.reset(0)
    env.by_last, env.arrivals = by_last, ARRIVALS
    return env


def answer(*lines):
    return "<answer>\n" + "\n".join(lines) + "\n</answer>"


def test_lists_are_sorted_by_the_key_of_the_episode_and_new_names_are_marked_from_turn_2():
    env = env_with(by_last=True)
    first = env.step(answer("BenAdler", "DoraEngel"))
    assert (first.reward, first.done) == (0.5, False) and "LeoDahl" in first.message["content"]
    last = env.step(answer("BenAdler", "LeoDahl // new name!", "DoraEngel"))
    assert (last.reward, last.done, last.info) == (0.5, True, {"correct": True, "right": 2})

    env = env_with(by_last=False)
    assert env.step(answer("BenAdler", "DoraEngel")).reward == 0.5
    assert env.step(answer("BenAdler", "DoraEngel", "LeoDahl // new name!")).reward == 0.5


@pytest.mark.parametrize("power", [1, 8])
def test_reward_is_the_similarity_to_the_power_divided_by_the_turns(power):
    env = env_with(power=power)
    # DoraEngel is the longest common part: 9 of the 18 characters of each list
    assert env.step(answer("DoraEngel", "BenAdler")).reward == 0.5**power / 2
    missing_mark = env.step(answer("BenAdler", "LeoDahl", "DoraEngel"))
    assert 0 < missing_mark.reward < 0.5 and missing_mark.info == {"correct": False, "right": 0}
