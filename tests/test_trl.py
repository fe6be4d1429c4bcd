"""Agreement with TRL: two epochs on the same rollouts, TRL's `train()` against our update.

No copy of a formula stands between the two. TRL's trainer is handed what "was sampled", scores it,
pays it and steps twice; so does ours. The first step is taken by the weights that sampled, where
every ratio is 1; before the second both sides get other weights, so that much is clipped.

TRL pads prompts on the left and completions on the right in one batch; we cut micro-batches.
"""

import gc
import random
from collections import defaultdict

import pytest
import torch
from conftest import load_small, save_small
from single_update import gradients_of_update, moved
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import train
from algorithms import grpo
from core import config
from core.types import Rollout, Turn

PROMPTS = ["Count", "What is the word on the left page?", "Move right"]
GROUP = 4
MAX_TOKENS = 40  # what `dr_grpo` divides by
BETA = 0.04
RELATIVE = 1e-5
LOSS_TYPES = {  # of TRL
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "lite_ppo": {"loss_type": "dapo", "scale_rewards": "batch"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence",
             "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},  # the cap; our clip_high is above 1
}  # fmt: skip
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
    return [moved(sampled, distance, generator) for distance in (0.04, 0.02)]


def draw(folder):
    """Rollouts of tokens drawn evenly, of unequal lengths; every other one has two turns."""
    tokenizer, rng, rollouts = AutoTokenizer.from_pretrained(folder), random.Random(0), []

    def turn(prompt_ids):
        # TRL calls a completion cut off that doesn't end with the token that ends a turn
        ids = [rng.randrange(256) for _ in range(rng.randint(2, 11))]
        finish_reason = rng.choice(["stop", "stop", "length"])
        ids += [tokenizer.eos_token_id] * (finish_reason == "stop")
        logprobs = [-rng.uniform(5.0, 6.5) for _ in ids]
        return Turn(prompt_ids, ids, logprobs, finish_reason, rng.choice([0.0, 0.25, 1.0]))

    for i in range(len(PROMPTS) * GROUP):
        group = i // GROUP
        turns = [turn(tokenizer(PROMPTS[group])["input_ids"])]
        if i % 2:
            answer = [rng.randrange(256) for _ in range(3)]  # of the environment, not trained
            turns.append(turn(turns[0].prompt_ids + turns[0].completion_ids + answer))
        rollouts.append(Rollout("test", "player", seed=group, group_id=group, turns=turns))
    return rollouts


def as_trl_has_it(rollouts):
    """What a `rollout_func` returns: all after the first prompt is completion, some not ours."""
    columns = defaultdict(list)
    for rollout in rollouts:
        ids, ours, logprobs = [], [], []
        for turn in rollout.turns:
            context = turn.prompt_ids[len(ids) :]
            ids += context + turn.completion_ids
            ours += [0] * len(context) + [1] * len(turn.completion_ids)
            logprobs += [0.0] * len(context) + turn.sampler_logprobs
        start = len(rollout.turns[0].prompt_ids)
        columns["prompt_ids"].append(ids[:start])
        for name, of_ids in (("completion_ids", ids), ("logprobs", logprobs), ("env_mask", ours)):
            columns[name].append(of_ids[start:])
        columns["paid"].append(rollout.episode_return)
    return columns


class Watch(TrainerCallback):
    """Notes the gradient of each step, weights by name; after it, gives the model other weights."""

    def __init__(self, later):
        self.later, self.gradients = later, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        parameters = [p for _, p in sorted(model.named_parameters())]
        self.gradients.append(torch.cat([p.grad.flatten() for p in parameters]))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.load_state_dict(self.later)


def their_steps(folder, weights, rollouts, **changes):
    """Gradients of TRL's steps on our rollouts, and what it logged of the last; what isn't given is
    as TRL has it."""
    from datasets import Dataset  # imports that take seconds
    from trl import GRPOConfig, GRPOTrainer

    (later, reference), sampled = weights, as_trl_has_it(rollouts)
    watch = Watch(later)
    fixed = {
        "output_dir": str(folder / "trl"), "use_cpu": True, "bf16": False, "report_to": "none",
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "shuffle_dataset": False,
        "gradient_checkpointing": False, "learning_rate": 0.0, "max_grad_norm": 0.0,
        "per_device_train_batch_size": len(rollouts), "num_generations": GROUP,
        "num_iterations": 2, "max_steps": 2, "max_completion_length": MAX_TOKENS,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        reward_funcs=lambda **_: sampled["paid"],
        args=GRPOConfig(**fixed, **changes),
        callbacks=[watch],
        rollout_func=lambda prompts, trainer: sampled,
    )
    if trainer.ref_model is not None:
        trainer.ref_model.load_state_dict(reference)
    trainer.train()
    return watch.gradients, trainer.state.log_history[-2]  # the very last is of the whole run


# With GSPO, TRL multiplies the KL of a token by the ratio of its sequence, we by that of the token.
@pytest.mark.parametrize(("variant", "beta"), [(v, BETA * (v != "gspo")) for v in LOSS_TYPES])
def test_loss_and_gradient_equal_trl_s(folder, weights, variant, beta):
    rollouts, (later, reference) = draw(folder), weights
    settings = {"kl_coef": BETA, "kl_estimator": "k3"} if beta else {}  # what TRL's `beta` is
    if variant in ("gspo", "cispo"):
        settings["algo"] = variant
    else:
        settings["options"] = grpo.Options(variant)
    cfg = config.resolve(train.Config(
        max_tokens=MAX_TOKENS, num_epochs=2, max_grad_norm=0.0, tis_cap=0.0, **settings
    ))  # fmt: skip
    policy = load_small(folder)
    policy.micro_batch_tokens = 100
    reference = reference if beta else None
    ours, metrics = gradients_of_update(cfg, policy, rollouts, later, reference)
    theirs, log = their_steps(folder, weights, rollouts, beta=beta, **LOSS_TYPES[variant])
    assert len(ours) == len(theirs) == 2
    for mine, other in zip(ours, theirs, strict=True):
        assert other.norm() > 1e-2
        assert (mine - other).norm() < RELATIVE * other.norm()
    same = {"loss": "loss", "policy/entropy": "entropy"}
    high, low = "clip/high_fraction", "clip/low_fraction"
    assert metrics[high] > 0 and metrics[high] + metrics[low] < 1
    if variant == "cispo":
        assert metrics[low] == 0 and metrics[high] > log["cispo_clip_ratio"] > 0  # TRL's: A > 0
    elif variant == "gspo":  # ours is a share of tokens, TRL's of sequences
        assert metrics[low] > 0 and log["clip_ratio/low_mean"] > 0 < log["clip_ratio/high_mean"]
    else:
        same |= {low: "clip_ratio/low_mean", high: "clip_ratio/high_mean"}
    if beta:
        same |= {"kl/reference": "kl"}
    for name, theirs in same.items():
        assert metrics[name] == pytest.approx(log[theirs], rel=RELATIVE), name
        assert log[theirs]
