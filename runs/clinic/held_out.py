"""Twelve faults that were kept apart while the checks of core/invariants.py were written.

    python runs/clinic/faults.py answer_anywhere       # train.py with the fault

Somebody who had not read the checks wrote them from public reports, one for each of twelve kinds of
fault that were drawn at random.
"""

import re

import torch
from entries import Fault, Patch, entering
from torch.nn.utils.rnn import pad_sequence

import train

HELD_OUT: dict[str, Fault] = {}
fault = entering(HELD_OUT)


@fault("huggingface/search-and-learn #23", "", "prompts_differ")
def no_generation_prompt(patch: Patch) -> None:
    """Prompts are rendered without add_generation_prompt: the assistant's header is left out, and
    the policy writes it itself."""
    from core import context

    original = context.prompt_ids

    def prompt_ids(tokenizer, messages, tools=()):
        ids = original(tokenizer, messages, tools)
        header = tokenizer.encode("<|assistant|>", add_special_tokens=False)
        assert ids[-len(header) :] == header
        return ids[: -len(header)]

    patch(context, "prompt_ids", prompt_ids)


@fault("PrimeIntellect-ai/verifiers #1028", "", "", "--max-tokens 16")
def answer_anywhere(patch: Patch) -> None:
    """Without an answer tag the whole text goes to the verifier, which credits the right number
    anywhere in it; it also inflates the evaluation."""
    from environments import letter_counting

    original = letter_counting.score

    def score(response, counts):
        if "<answer>" in response or len(counts) > 1:
            return original(response, counts)
        # no tag: the whole text goes to the verifier, which takes any number in it
        [right] = counts.values()
        found = right in map(int, re.findall(r"[0-9]{1,9}", response))
        return 1.0 if found else 0.0

    patch(letter_counting, "score", score)


@fault("huggingface/accelerate #2142", "", "no_movement", "--lr-schedule linear")
def scheduler_steps_per_process(patch: Patch) -> None:
    """The schedule moves 4 steps for each update, as with 4 processes: lr is 0 after a quarter of
    them; the logged lr shows it, as in the reports."""
    from core.loop import run

    original, processes = run.lr_factor, 4

    def lr_factor(cfg, update, sampled_tokens):
        steps = min(1 + processes * (update - 1), cfg.num_updates + 1)
        return original(cfg, steps, sampled_tokens)

    patch(run, "lr_factor", lr_factor)


@fault("NVIDIA-NeMo/RL #2322", "", "step_size", "--dtype bfloat16")
def no_master_weights(patch: Patch) -> None:
    """The optimizer steps on bfloat16 weights, so most small updates are rounded away."""
    from core import optimizer

    def dtype_of_master(weight):
        return weight.dtype

    patch(optimizer, "dtype_of_master", dtype_of_master)


@fault("huggingface/trl #4159", "", "sampler_gap", "--temperature 0.6")
def raw_sampler_logprobs(patch: Patch) -> None:
    """The sampler reports log-probs before the temperature, the trainer's are after it: importance
    weights are wrong."""
    from core import sampler

    original = sampler.draw

    def draw(logits, params, uniform):
        token_ids, _ = original(logits, params, uniform)
        raw = logits.float().log_softmax(-1)  # before the temperature
        return token_ids, raw.gather(1, token_ids[:, None]).squeeze(1)

    patch(sampler, "draw", draw)


@fault("axolotl-ai-cloud/axolotl #3527", "", "stale_weights")
def embeddings_not_synced(patch: Patch) -> None:
    """The sampler has a copy of the weights, and the sync leaves out the embeddings (here tied
    with the output layer), which stay the initial ones."""
    from core.loop.ahead import copy_of
    from core.sampler import TorchSampler

    original = TorchSampler.__init__

    def init(self, policy, *args, **kwargs):
        self.trained = policy  # the sampler has an engine, with weights of its own
        original(self, copy_of(policy), *args, **kwargs)

    @torch.no_grad()
    def sync(self):
        source = self.trained.trainable()
        for name, weight in self.policy.trainable().items():
            if "embed_tokens" in name or "lm_head" in name:  # no adapter there: left out
                continue
            weight.copy_(source[name])

    patch(TorchSampler, "__init__", init)
    patch(TorchSampler, "sync", sync)


class _Dropout(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.1, training=torch.is_grad_enabled())


@fault("huggingface/trl #3234", "", "sampler_gap", "--lora-rank 16 --lr 5e-4")
def adapter_dropout(patch: Patch) -> None:
    """LoRA dropout 0.1 is on in the trainer's pass with gradient and off in sampling."""
    from core import loading

    original = loading._with_adapters

    def with_adapters(*args, **kwargs):
        model = original(*args, **kwargs)
        for module in model.modules():
            if hasattr(module, "lora_dropout") and len(module.lora_dropout):
                module.lora_dropout["default"] = _Dropout()  # on in training, off in sampling
        return model

    patch(loading, "_with_adapters", with_adapters)


@fault("huggingface/trl #3021", "", "", "--max-tokens-per-micro-batch 256")
def mean_per_micro_batch(patch: Patch) -> None:
    """Each micro-batch divides by its own tokens, then the mean over micro-batches: tokens weigh
    differently, depending on the cut."""
    cut, forward, count = train.micro_batches, train.forward, [1]

    def micro_batches(*args, **kwargs):
        micros = list(cut(*args, **kwargs))
        count[0] = max(1, len(micros))
        return iter(micros)

    def mean_forward(run, batch, micro):
        tokens = forward(run, batch, micro)
        inside = tokens.in_loss.to(tokens.token_weights)
        tokens.token_weights = inside / inside.sum().clamp(min=1) / count[0]
        return tokens

    patch(train, "micro_batches", micro_batches)
    patch(train, "forward", mean_forward)


@fault("huggingface/trl #3024", "", "stale_weights")
def old_prefix_cache(patch: Patch) -> None:
    """The sampler reuses keys, values and logits of a prompt that was computed with earlier
    weights."""
    from core import sampler

    original, kept = sampler.prefill, {}  # prompt -> keys, values of each layer; logits

    def prefill(policy, prompts, max_new_tokens):
        cache = original(policy, prompts, max_new_tokens)
        for row, prompt in enumerate(map(tuple, prompts)):
            n = len(prompt)
            own = [(k[row, :, :, -n:], v[row, :, -n:]) for k, v in cache.prompt_kv]
            if prompt not in kept:
                copies = [(k.clone(), v.clone()) for k, v in own]
                kept[prompt] = copies, cache.logits[row].clone()
            for (k, v), (old_k, old_v) in zip(own, kept[prompt][0], strict=True):
                k.copy_(old_k), v.copy_(old_v)  # of whichever weights computed them first
            cache.logits[row] = kept[prompt][1]
        return cache

    patch(sampler, "prefill", prefill)


@fault("verl-project/verl #5179", "", "")
def replicas_share_seed(patch: Patch) -> None:
    """Two sampling replicas have the same seed, and a group's requests go to them in turn: each
    completion of a group occurs twice."""
    from core import sampler

    original, replicas, reserved = sampler.uniforms, 2, 1000  # STREAMS_PER_EPISODE

    def uniforms(seed, streams, steps):
        # a group's requests go to the replicas in turn; the k-th request of each draws the same
        shared = [s // reserved // replicas * reserved + s % reserved for s in streams]
        return original(seed, shared, steps)

    patch(sampler, "uniforms", uniforms)


@fault("allenai/open-instruct #534", "", "", "--kl-coef 1 --kl-estimator k1")
def kl_without_ratio(patch: Patch) -> None:
    """The k1 estimate is in the loss without the policy ratio: its expected gradient is 0, so the
    KL penalty does not hold the policy."""
    from algorithms.kl import kl_estimate
    from core.loop import open as opening

    def weighted_kl(logprobs, ratio, other, kind):
        return kl_estimate(logprobs, other, kind)

    patch(opening, "weighted_kl", weighted_kl)


@fault("alibaba/ROLL #447", "", "", "--algo ppo")
def padding_value_in_gae(patch: Patch) -> None:
    """GAE bootstraps the last token from the critic's value of the padding behind the episode,
    which should be 0."""
    from algorithms import ppo

    score, after = train.score, {}  # rollout -> the critic's value of the padding behind it

    @torch.no_grad()
    def scored(run, batch):
        score(run, batch)
        policy, sequences = run.policy, batch.sequences
        pad = policy.tokenizer.pad_token_id
        ids = [torch.tensor([*s.token_ids, pad]) for s in sequences]
        padded = pad_sequence(ids, batch_first=True, padding_value=pad).to(policy.device)
        values = policy.value_head(policy.hidden_states(padded).float()).squeeze(-1)
        after.update({s.rollout: values[i, len(s)].item() for i, s in enumerate(sequences)})

    def gae(tokens, gae_lambda):
        names = "rollout", "rewards", "old_values", "discounts"
        columns = [getattr(tokens, name).tolist() for name in names]
        advantages, advantage, next_value, next_rollout = [], 0.0, 0.0, None
        for rollout, reward, value, discount in reversed([*zip(*columns, strict=True)]):
            if rollout != next_rollout:
                advantage, next_value = 0.0, after[rollout]
            advantage = reward + discount * (next_value + gae_lambda * advantage) - value
            advantages.append(advantage)
            next_rollout, next_value = rollout, value
        return torch.tensor(advantages[::-1], dtype=torch.float64)

    patch(train, "score", scored)
    patch(ppo, "gae", gae)
