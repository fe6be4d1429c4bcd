"""Tasks depend on the seed and the update only."""

from core.tasks import (
    demo_tasks,
    eval_tasks,
    harder,
    next_level,
    train_tasks,
    with_difficulty,
)
from environments.base import DEMO_SEEDS, EVAL_SEEDS, TRAIN_SEEDS
from environments.plumbing.registry import EnvSpec

ENVS = ["letter_counting", "letter_counting:difficulty=2", "letter_counting:difficulty=3"]


def test_environments_take_turns_also_across_updates():
    envs = [str(t.env) for u in (1, 2, 3) for t in train_tasks(ENVS, 0, u, 4, 1)]
    assert [envs.count(env) for env in ENVS] == [4, 4, 4]
    envs = [str(t.env) for step in range(3) for t in demo_tasks(ENVS, 0, step, 2, 0.5)]
    assert [envs.count(env) for env in ENVS] == [2, 2, 2]


def test_seed_update_and_attempt_decide_the_tasks():
    first = train_tasks(ENVS, 0, 1, 4, 2)
    assert first == train_tasks(ENVS, 0, 1, 4, 2) != train_tasks(ENVS, 1, 1, 4, 2)
    for others in (train_tasks(ENVS, 0, 2, 4, 2), train_tasks(ENVS, 0, 1, 4, 2, 1)):
        assert {t.seed for t in first}.isdisjoint(t.seed for t in others)


def test_training_demonstrations_and_evaluation_draw_from_disjoint_ranges():
    drawn = [
        ({t.seed for u in range(50) for t in train_tasks(ENVS, 3, u, 16, 1)}, TRAIN_SEEDS),
        ({t.seed for s in range(50) for t in demo_tasks(ENVS, 3, s, 16, 0.5)}, DEMO_SEEDS),
        ({t.seed for t in eval_tasks(ENVS, 256)}, EVAL_SEEDS),
    ]
    for seeds, allowed in drawn:
        assert all(seed in allowed for seed in seeds)
    assert not drawn[0][0] & drawn[1][0] and not drawn[1][0] & drawn[2][0]


def test_the_fraction_of_hasty_demonstrations_is_the_given_one():
    for share in (0.0, 0.6, 1.0):
        tasks = [t for step in range(100) for t in demo_tasks(ENVS, 0, step, 32, share)]
        assert abs(sum(t.hasty for t in tasks) / len(tasks) - share) < 0.03


def test_every_evaluation_has_the_same_tasks():
    tasks = eval_tasks(ENVS, 10)
    assert tasks == eval_tasks(ENVS, 10)
    assert len({t.group_id for t in tasks}) == 30
    seeds = [[t.seed for t in tasks if str(t.env) == env] for env in ENVS]
    assert len(seeds[0]) == 10 and seeds[0] == seeds[1] == seeds[2]


def test_difficulty_sets_the_option_that_the_environment_has_for_it():
    specs = ["math_qa", "reverse:length=4,turns=1", "wikipedia_maze", "tic_tac_toe"]
    read = [*map(EnvSpec.read, specs)]
    assert [str(with_difficulty(spec, 3)) for spec in read] == [
        "math_qa:level=3", "reverse:turns=1,length=3", "wikipedia_maze:n_hops=3", "tic_tac_toe",
    ]  # fmt: skip
    assert [with_difficulty(spec, 0) for spec in read] == read


def test_the_curriculum_follows_the_training_accuracy():
    envs = [EnvSpec.read("math_qa:level=2"), EnvSpec.read("letter_counting")]
    assert [next_level(envs, 1, accuracy, target=0.8) for accuracy in (0.8, 0.79, 0.41, 0.4)] == [
        2, 1, 1, 0,
    ]  # fmt: skip
    assert next_level(envs, 0, 0.0, target=0.8) == 0  # not below the given difficulty
    assert (
        next_level([EnvSpec.read("math_qa:level=6")], 0, 1.0, target=0.8) == 0
    )  # the highest level
    assert [str(harder(env, 5)) for env in envs] == [
        "math_qa:level=6",
        "letter_counting:difficulty=6",
    ]
