"""Snake: what kills, what pays, what the seed decides, and that a demonstrator eats all."""

import random
import time

import pytest

from core.types import UsageError
from environments.registry import make
from environments.snake import Snake, safe_move, shortest_path


def move(word):
    return f"<move>{word}</move>"


def placed(body, fruit, **options):
    """An environment whose snake lies on `body`, the head first, with the fruit where it is put."""
    env = Snake(**options)
    env.reset(0)
    env.body, env.fruit = list(body), fruit
    return env


def play(env, seed, hasty=False):
    """The steps of one episode as the environment demonstrates it."""
    env.reset(seed)
    steps = []
    while not steps or not steps[-1].done:
        steps.append(env.step(env.demonstrate(hasty)))
    return steps


def test_opening_shows_a_straight_snake_and_a_fruit_on_a_free_cell():
    starts = set()
    for seed in range(300):
        env = Snake()
        (message,) = env.reset(seed)
        assert len(message["content"]) < 250
        head, middle, tail = env.body
        assert (middle[0] - head[0], middle[1] - head[1]) == (
            tail[0] - middle[0],
            tail[1] - middle[1],
        )
        assert all(0 <= x < 10 and 0 <= y < 10 for x, y in [*env.body, env.fruit])
        assert env.fruit not in env.body
        starts.add((middle[0] - head[0], middle[1] - head[1]))
    assert starts == {(0, 1), (0, -1), (1, 0), (-1, 0)}


def test_same_seed_is_the_same_episode_whatever_was_played_before():
    env = Snake()
    first = play(env, 3)
    opening = env.reset(3)
    guess = env.demonstrate(hasty=True)
    play(env, 4, hasty=True)
    assert play(env, 3) == first
    assert env.reset(3) == opening == Snake().reset(3) != env.reset(4)
    env.reset(3)
    assert env.demonstrate(hasty=True) == guess


@pytest.mark.parametrize(
    "text, head",
    [
        ("<move>up</move>", (5, 4)),
        ("<move>down</move> no, <move>up</move>", (5, 4)),
        ('{"move": "down"}', (5, 6)),
        ('<move>up</move> {"move": "Down"}', (5, 6)),  # JSON comes first
        ("not left, so down.", (5, 6)),
        ("the fruit is up <move>right</move> left", (6, 5)),
        ("<move>sideways</move> up", (5, 4)),
    ],
)
def test_last_well_formed_move_is_made(text, head):
    env = placed([(5, 5), (4, 5), (3, 5)], (0, 0))
    step = env.step(text)
    assert env.body[0] == head and (step.reward, step.done) == (-0.001, False)


def test_fruit_pays_1_grows_the_snake_and_the_last_one_solves():
    env = placed([(5, 5), (4, 5), (3, 5)], (6, 5), fruits=2)
    step = env.step(move("right"))
    assert step.reward == pytest.approx(0.999) and not step.done
    assert env.body == [(6, 5), (5, 5), (4, 5), (3, 5)]
    assert step.info == {"correct": False, "fruits": 1}
    env.fruit = (6, 4)
    step = env.step(move("up"))
    assert step.reward == pytest.approx(0.999) and step.done and step.message is None
    assert step.info == {"correct": True, "fruits": 2}


@pytest.mark.parametrize("word", ["left", "up"])
def test_wall_and_turning_back_kill(word):
    env = placed([(5, 0), (4, 0), (3, 0)], (9, 9))
    step = env.step(move(word))
    assert (step.reward, step.done, step.message) == (-1.001, True, None)
    assert step.info == {"correct": False, "fruits": 0}


def test_tail_gives_way_but_the_rest_of_the_body_does_not():
    ring = [(1, 1), (1, 2), (2, 2), (2, 1)]
    assert not placed(ring, (9, 9)).step(move("right")).done
    assert placed([*ring, (3, 1)], (9, 9)).step(move("right")).done


def test_episode_ends_after_max_steps_without_a_bonus():
    env = placed([(5, 5), (4, 5), (3, 5)], (0, 0), max_steps=2)
    assert not env.step(move("up")).done
    step = env.step(move("up"))
    assert (step.reward, step.done, step.info["correct"]) == (-0.001, True, False)


def test_third_unreadable_response_ends_the_episode():
    env = Snake()
    env.reset(0)
    body = list(env.body)
    assert [(s.reward, s.done) for s in (env.step("hm") for _ in range(3))] == [
        (-0.1, False),
        (-0.1, False),
        (-1.0, True),
    ]
    assert env.body == body and env.steps == 0
    env.reset(0)
    assert env.step("hm").reward == -0.1  # a new episode forgives again


def test_grid_shows_head_body_and_fruit_where_they_are():
    env = placed([(1, 1), (0, 1), (0, 0)], (3, 2), size=4, grid=True)
    assert env.step(move("right")).message["content"].splitlines() == [
        "head 2,1 body 1,1 0,1 fruit 3,2",
        "....",
        "ooH.",
        "...F",
        "....",
    ]


def test_shortest_path_counts_on_the_tail_to_move_on():
    wall = [(0, 0), (1, 0), (1, 1), (1, 2), (0, 2)]  # the tail closes the way down for one step
    assert shortest_path(wall, (0, 3), 4) == [(0, 1), (0, 2), (0, 3)]
    assert shortest_path([(0, 0), (1, 0), (1, 1), (0, 1), (0, 2)], (3, 3), 4) is None


def test_safe_move_leaves_a_fruit_that_would_lock_the_snake_in():
    body = [(0, 1), (1, 1), (1, 0), (2, 0), (2, 1), (2, 2), (1, 2), (0, 2), (0, 3)]
    assert shortest_path(body, (0, 0), 4) == [(0, 0)]  # a dead end: nothing gives way in time
    assert safe_move(body, (0, 0), 4) == "up"  # no other move is left
    assert safe_move([(1, 1), (0, 1), (0, 2)], (1, 3), 4) == "down"


def test_demonstrator_eats_all_fruits_on_every_seed_and_stays_short():
    env = Snake()
    for seed in range(200):
        env.reset(seed)
        total, step = 0.0, None
        while step is None or not step.done:
            text = env.demonstrate()
            assert len(text) < 64 and text == env.demonstrate()
            step = env.step(text)
            assert step.message is None or len(step.message["content"]) < 120
            total += step.reward
        assert step.info == {"correct": True, "fruits": 5}
        assert total == pytest.approx(5 - 0.001 * env.steps) and env.steps < 100


def test_hasty_player_moves_at_random_and_soon_dies():
    env = Snake()
    last = [play(env, seed, hasty=True)[-1] for seed in range(100)]
    assert all(step.reward == -1.001 for step in last)
    env.reset(0)
    words = {env.demonstrate(hasty=True) for env.steps in range(50)}
    assert words == {move(word) for word in ("up", "down", "left", "right")}


def test_fullest_board_ends_without_a_cell_for_another_fruit():
    env = Snake(size=4, fruits=13, max_steps=1000)
    assert any(play(env, seed)[-1].info == {"correct": True, "fruits": 13} for seed in range(20))


@pytest.mark.parametrize(
    "options", ["size=3", "size=21", "fruits=0", "size=4,fruits=14", "max_steps=0", "grid=1"]
)
def test_bad_option_is_one_line(options):
    with pytest.raises(UsageError) as error:
        make(f"snake:{options}")
    assert "\n" not in str(error.value)


HOSTILE = [
    "",
    "x" * 100_000,
    "<move>" * 20_000,
    '{"move":' * 20_000,
    "\ud800",
    "\0" * 99,
    "[" * 99_999,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_refused_quickly(text):
    env = Snake()
    env.reset(0)
    started = time.perf_counter()
    assert env.step(text).reward == -0.1
    assert time.perf_counter() - started < 0.5


def test_random_play_never_raises():
    rng, env = random.Random(0), Snake(size=4, fruits=13)
    for seed in range(200):
        env.reset(seed)
        while not env.step(rng.choice(["up", "down", "left", "right"])).done:
            assert len(set(env.body)) == len(env.body) == 3 + env.eaten
