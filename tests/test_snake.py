"""Snake: collisions, rewards, the observation and the demonstrations."""

import pytest

from environments.snake import MAX_STEPS, Snake, shortest_path


def move(word):
    return f"<move>{word}</move>"


def at(body, fruit, **options):
    """Returns an episode with the snake on `body` (the head first) and the given fruit."""
    env = Snake(**options)
    env.reset(0)
    env.body, env.fruit = list(body), fruit
    return env


STRAIGHT = [(5, 5), (4, 5), (3, 5)]


def test_a_fruit_has_reward_1_and_grows_the_snake_and_the_last_one_is_correct():
    env = at(STRAIGHT, (6, 5), fruits=2)
    step = env.step(move("right"))
    assert step.reward == pytest.approx(0.999) and not step.done
    assert env.body == [(6, 5), *STRAIGHT]
    assert step.info == {"correct": False, "fruits": 1}
    env.fruit = (6, 4)
    step = env.step(move("up"))
    assert step.reward == pytest.approx(0.999) and step.done
    last = "You ate 2 of 2 fruits.\nhead 6,4 body 6,5 5,5 4,5 3,5 fruit 6,4"
    assert step.message["content"] == last
    assert step.info == {"correct": True, "fruits": 2}


@pytest.mark.parametrize("word, what", [("left", "your body"), ("up", "a wall")])
def test_the_body_and_a_wall_end_the_episode(word, what):
    step = at([(5, 0), (4, 0), (3, 0)], (9, 9)).step(move(word))
    assert (step.reward, step.done) == (-1.001, True)
    assert step.message["content"] == f"You hit {what}.\nhead 5,0 body 4,0 3,0 fruit 9,9"
    assert step.info == {"correct": False, "fruits": 0}


def test_the_head_may_enter_the_cell_that_the_tail_leaves():
    ring = [(1, 1), (1, 2), (2, 2), (2, 1)]
    assert not at(ring, (9, 9)).step(move("right")).done
    assert at([*ring, (3, 1)], (9, 9)).step(move("right")).done
    # but no cell before the body has left it: in a corner, around to the middle of the own body
    assert shortest_path([(1, 0), (0, 0), (0, 1)], (0, 0), 2) == [(1, 1), (0, 1), (0, 0)]


def test_the_last_of_max_steps_ends_the_episode():
    env = at(STRAIGHT, (9, 9))
    env.steps = MAX_STEPS - 2
    assert [env.step(move("right")).done for _ in range(2)] == [False, True]
