"""Tasks depend on the seed and the update only."""

import pytest

from core import tasks as of_run
from core.config import Config
from core.tasks import demo_tasks, eval_tasks, harder, next_level, train_tasks, with_difficulty
from core.types import Rollout
from environments.base import DEMO_SEEDS, EVAL_SEEDS, TRAIN_SEEDS
from environments.plumbing.registry import EnvSpec

ENVS = ["letter_counting", "letter_counting:difficulty=2", "letter_counting:difficulty=3"]


def test_environments_take_turns_also_across_updates():
    trained = [t for update in (1, 2, 3) for t in train_tasks(ENVS, 0, update, 4, 1)]
    shown = [t for step in range(3) for t in demo_tasks(ENVS, 0, step, 2, 0.5)]
    for tasks in (trained, shown):
        envs = [str(task.env) for task in tasks]
        assert [envs.count(env) for env in ENVS] == [len(envs) // 3] * 3
    cfg = Config(env=tuple(map(EnvSpec.read, ENVS)), num_prompts=6, sft_steps=0)
    assert of_run.begin(cfg).num_prompts == 2


def test_seed_update_and_attempt_decide_the_tasks():
    first = train_tasks(ENVS, 0, 1, 4, 2)
    assert first == train_tasks(ENVS, 0, 1, 4, 2) != train_tasks(ENVS, 1, 1, 4, 2)
    for others in (train_tasks(ENVS, 0, 2, 4, 2), train_tasks(ENVS, 0, 1, 4, 2, 1)):
        assert {t.seed for t in first}.isdisjoint(t.seed for t in others)


def test_training_demonstrations_and_evaluation_draw_from_disjoint_ranges():
    trained = {t.seed for u in range(50) for t in train_tasks(ENVS, 3, u, 16, 1)}
    shown = {t.seed for s in range(50) for t in demo_tasks(ENVS, 3, s, 16, 0.5)}
    held_out = {t.seed for t in eval_tasks(ENVS, 256)}
    for seeds, allowed in ((trained, TRAIN_SEEDS), (shown, DEMO_SEEDS), (held_out, EVAL_SEEDS)):
        assert all(seed in allowed for seed in seeds)
    assert not trained & shown and not (trained | shown) & held_out


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_the_fraction_of_hasty_demonstrations_is_the_given_one(share):
    tasks = [t for step in range(100) for t in demo_tasks(ENVS, 0, step, 32, share)]
    assert abs(sum(t.hasty for t in tasks) / len(tasks) - share) < 0.03


def test_every_evaluation_has_the_same_tasks():
    tasks = eval_tasks(ENVS, 10)
    assert tasks == eval_tasks(ENVS, 10) and len({t.group_id for t in tasks}) == 30
    seeds = [[t.seed for t in tasks if str(t.env) == env] for env in ENVS]
    assert len(seeds[0]) == 10 and seeds[0] == seeds[1] == seeds[2]


def test_difficulty_sets_the_option_that_the_environment_has_for_it():
    for spec, expected in {
        "math_qa": "math_qa:level=3", "reverse:length=4,turns=1": "reverse:turns=1,length=3",
        "wikipedia_maze": "wikipedia_maze:n_hops=3", "tic_tac_toe": "tic_tac_toe",
    }.items():  # fmt: skip
        spec = EnvSpec.read(spec)
        assert str(with_difficulty(spec, 3)) == expected and with_difficulty(spec, 0) == spec
    assert str(harder(EnvSpec.read("tic_tac_toe"), 5)) == "tic_tac_toe"


@pytest.mark.parametrize("level, right, wrong, failed, after", [
    (1, 8, 2, 0, 2), (1, 7, 3, 0, 1), (1, 5, 5, 0, 1), (1, 4, 6, 0, 0),
    (0, 0, 9, 0, 0),  # not below the given difficulty
    (5, 9, 0, 0, 5),  # math_qa has no level 7
    (1, 8, 2, 9, 2), (1, 0, 0, 9, 1),  # nor those that failed or have no verdict
])  # fmt: skip
def test_the_curriculum_follows_the_training_accuracy(level, right, wrong, failed, after):
    cfg = Config(env=(EnvSpec.read("math_qa:level=1"),), curriculum=0.8)
    answers = [(True, "")] * right + [(False, "")] * wrong + [(False, "E"), (None, "")] * failed
    rollouts = [Rollout("e", "p", 0, 0, info={"correct": c}, error=e) for c, e in answers]
    assert next_level(cfg, level, rollouts) == after
