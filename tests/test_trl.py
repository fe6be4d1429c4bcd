"""Agreement with TRL: two epochs on the same rollouts, TRL's `train()` against our `learn`.

No copy of a formula stands between the two. TRL's trainer is handed what "was sampled", scores it,
pays it and steps twice; so does ours. The first step is taken by the weights that sampled, where
every ratio is 1; before the second both sides get other weights, so that much is clipped.

TRL pads prompts on the left and completions on the right in one batch; we cut micro-batches.
"""

import gc
import random

import pytest
import torch
from conftest import save_small
from single_update import gradients_of_update, moved
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import train
from algorithms import grpo
from core import config
from core.config import Config
from core.loading import load_policy
from core.types import Rollout, Turn

PROMPTS = ["Count", "What is the word on the left page?", "Move right"]
GROUP = 4
ROLLOUTS = len(PROMPTS) * GROUP
MAX_TOKENS = 40  # what `dr_grpo` divides by
BETA = 0.04
K3 = {"kl_coef": BETA, "kl_estimator": "k3"}  # what TRL's `beta` is
RELATIVE = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:.*(gradient_checkpointing|rollout_func)")


@pytest.fixture(scope="module", autouse=True)
def quick():
    """The garbage collections that TRL asks for skip what is imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The weights that sampled."""
    return save_small("Qwen3", tmp_path_factory.mktemp("sampled"))


@pytest.fixture(scope="module")
def weights(folder):
    """Those of the second step, and those of the reference: near the first and not the same."""
    sampled = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    generator = torch.Generator().manual_seed(0)
    return {name: moved(sampled, distance, generator)
            for name, distance in (("present", 0.04), ("reference", 0.02))}  # fmt: skip


def draw(folder):
    """Rollouts of tokens drawn evenly, of unequal lengths; every other one has two turns."""
    tokenizer, rng, found = AutoTokenizer.from_pretrained(folder), random.Random(0), []

    def turn(prompt_ids):
        # TRL calls a completion cut off that doesn't end with the token that ends a turn
        ids = [rng.randrange(256) for _ in range(rng.randint(2, 11))]
        finish_reason = rng.choice(["stop", "stop", "length"])
        ids += [tokenizer.eos_token_id] * (finish_reason == "stop")
        logprobs = [-rng.uniform(5.0, 6.5) for _ in ids]
        return Turn(prompt_ids, ids, logprobs, finish_reason, rng.choice([0.0, 0.25, 1.0]))

    for i in range(ROLLOUTS):
        group = i // GROUP
        rollout = Rollout("test", "player", seed=group, group_id=group)
        rollout.turns.append(turn(tokenizer(PROMPTS[group])["input_ids"]))
        if i % 2:
            first = rollout.turns[0]
            answer = [rng.randrange(256) for _ in range(3)]  # of the environment, not trained
            rollout.turns.append(turn(first.prompt_ids + first.completion_ids + answer))
        found.append(rollout)
    return found


def as_trl_has_it(rollouts):
    """What a `rollout_func` returns: all after the first prompt is completion, some not ours."""
    columns = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "paid": []}
    for rollout in rollouts:
        start, last = len(rollout.turns[0].prompt_ids), rollout.turns[-1]
        whole = last.prompt_ids + last.completion_ids
        ours, logprobs = [0] * len(whole), [0.0] * len(whole)
        for turn in rollout.turns:
            begin, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids)
            ours[begin:end] = [1] * (end - begin)
            logprobs[begin:end] = turn.sampler_logprobs
        row = whole[:start], whole[start:], logprobs[start:], ours[start:], rollout.episode_return
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return columns


class Watch(TrainerCallback):
    """Note the gradient of each step; after the first, give the model other weights."""

    def __init__(self, present):
        self.present, self.gradients = present, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(gradient_of(model))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.load_state_dict(self.present)


def gradient_of(model):
    """The gradients of all weights, side by side."""
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters())])


def their_steps(folder, weights, rollouts, rewards=None, **changes):
    """Gradients of TRL's steps on our rollouts, and what it logged of the last; what isn't given is
    as TRL has it. `rewards`: a column for each reward function; None: the return is the only one.
    """
    from datasets import Dataset  # imports that take seconds
    from trl import GRPOConfig, GRPOTrainer

    sampled, watch = as_trl_has_it(rollouts), Watch(weights["present"])
    fixed = {
        "output_dir": str(folder / "trl"), "use_cpu": True, "bf16": False, "report_to": "none",
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "shuffle_dataset": False,
        "gradient_checkpointing": False, "learning_rate": 0.0, "max_grad_norm": 0.0,
        "per_device_train_batch_size": ROLLOUTS, "num_generations": GROUP, "num_iterations": 2,
        "max_steps": 2, "max_completion_length": MAX_TOKENS, "beta": 0.0,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        reward_funcs=[lambda column=column, **_: column for column in rewards or [sampled["paid"]]],
        args=GRPOConfig(**{**fixed, **changes}),
        callbacks=[watch],
        rollout_func=lambda prompts, trainer: sampled,
    )
    if trainer.ref_model is not None:
        trainer.ref_model.load_state_dict(weights["reference"])
    trainer.train()
    return watch.gradients, trainer.state.log_history[-2]  # the very last is of the whole run


def our_steps(folder, weights, rollouts, **changes):
    """Gradients of our steps, and the metrics, which are those of the last."""
    fixed = {"max_tokens": MAX_TOKENS, "num_epochs": 2, "max_grad_norm": 0.0, "tis_cap": 0.0}
    cfg = config.resolve(train.Config(**{**fixed, **changes}))
    config.validate(cfg)
    policy = load_policy(Config(device="cpu"), str(folder))
    policy.micro_batch_tokens = 100
    reference = weights["reference"] if cfg.kl_coef else None
    return gradients_of_update(cfg, policy, rollouts, weights["present"], reference)


LOSS_TYPES = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "lite_ppo": {"loss_type": "dapo", "scale_rewards": "batch"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence",
             "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},  # the cap; our clip_high is above 1
}  # fmt: skip


def assert_same_steps(ours, theirs):
    (gradients, metrics), (their_gradients, log) = ours, theirs
    assert len(gradients) == len(their_gradients) == 2
    for mine, other in zip(gradients, their_gradients, strict=True):
        assert other.norm() > 1e-2
        assert (mine - other).norm() < RELATIVE * other.norm()
    assert metrics["loss"] == pytest.approx(log["loss"], rel=RELATIVE)


# With GSPO, TRL multiplies the KL of a token by the ratio of its sequence, we by that of the token.
@pytest.mark.parametrize(("variant", "beta"), [(v, BETA * (v != "gspo")) for v in LOSS_TYPES])
def test_loss_and_gradient_equal_trl_s(folder, weights, variant, beta):
    rollouts, kl = draw(folder), K3 if beta else {}
    algo = {"algo": variant}
    if variant not in ("gspo", "cispo"):
        algo = {"options": grpo.Options(variant)}
    ours = our_steps(folder, weights, rollouts, **algo, **kl)
    theirs = their_steps(folder, weights, rollouts, beta=beta, **LOSS_TYPES[variant])
    assert_same_steps(ours, theirs)
    metrics, log = ours[1], theirs[1]
    high, low = metrics["clip/high_fraction"], metrics["clip/low_fraction"]
    assert high > 0 and high + low < 1
    assert metrics["policy/entropy"] == pytest.approx(log["entropy"], rel=RELATIVE)
    if variant == "cispo":
        assert low == 0 and high > log["cispo_clip_ratio"] > 0  # TRL counts only A > 0
    elif variant == "gspo":  # ours is a share of tokens, TRL's of sequences
        assert low > 0 and log["clip_ratio/low_mean"] > 0 and log["clip_ratio/high_mean"] > 0
    else:
        assert low == pytest.approx(log["clip_ratio/low_mean"], rel=RELATIVE) and low > 0
        assert high == pytest.approx(log["clip_ratio/high_mean"], rel=RELATIVE)
    if beta:
        assert metrics["kl/reference"] == pytest.approx(log["kl"], rel=RELATIVE)
        assert log["kl"] > 0.01
