"""Reading an action from free text; test_environments.py has the retries after others."""

import pytest

from environments.parsing import integer, one_of, read_action

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
