"""Reading an action from free text, and the retries after an unreadable one."""

import pytest

from environments.parsing import Retries, integer, one_of, read_action

PLAIN = r"move is (\d+)"


@pytest.mark.parametrize("response, action", [
    ("<move>5</move>", 5), ("first <move> 5 \n</move>", 5), ('{"move": 5}', 5),
    ('{"move": "5"}', 5), ("My move is 1. No, my move is 5.", 5),
    ("<move>1</move> no, <move>5</move>", 5),  # the last one
    ("<move>5</move> or <move>10</move>", 5),  # the last valid one
    ('<move>1</move> {"move": 5} <move>2</move>', 5),  # JSON first
    ('{"move": 5} and {"moves": 2}', 5),  # with the key
    ("move is 1 <move>5</move> move is 2", 5),  # then tags
    ("<move>1<move>5</move>", 5), ("5", None), ("<move>5", None), ("<move>five</move>", None),
    ('{"move": 5.0}', None), ('{"move": true}', None),
])  # fmt: skip
def test_read_action_returns_the_last_well_formed_action(response, action):
    assert read_action(response, "move", integer(0, 8), PLAIN) == action


def test_one_of_ignores_case_quotes_and_punctuation():
    convert = one_of("Left", "right")
    words = ["left", " 'LEFT'. ", '"right"!', "lefty", "", 3, None]
    assert [convert(word) for word in words] == ["Left", "Left", "right", None, None, None, None]


def test_retries_give_two_hints_and_then_end_the_episode():
    retries = Retries()
    steps = [retries.refuse("Again.", moves=3) for _ in range(3)]
    assert [(s.reward, s.done) for s in steps] == [(-0.1, False), (-0.1, False), (-1.0, True)]
    assert steps[1].message == {"role": "user", "content": "Again."} and steps[2].message is None
    assert all(s.info == {"correct": False, "invalid": True, "moves": 3} for s in steps)
