"""What every right repair of the drill does: facts about a module, asked of its functions.

A probe calls functions of the module on small inputs and answers several facts. It compares with
what must be true, not with our code: a standard deviation may divide by n or by n - 1, an epsilon
may have any size. Where a fact is about a quantity that another fault has removed, it holds.
"""

import inspect
import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

FACTS = {  # what fails is named by these sentences
    "answer_is_between_tags": "the reward is for the number between the tags, if there is just one",
    "tasks_know_their_answer": "the right number of a task is the count that its question asks for",
    "zero_is_an_answer": "the answer 0 is a number like others",
    "prompts_end_together": "all prompts of a batch end in its last column",
    "prompts_open_the_turn": "a prompt is what the chat template writes, the model's turn opened",
    "draws_are_the_policys": "tokens are drawn with the policy's probabilities, or greedily",
    "one_temperature": "sampling and training have the same temperature",
    "answers_end": "an answer ends with END, or has MAX_TOKENS tokens",
    "end_is_trained": "END is part of the answer",
    "nothing_after_the_end": "what follows END is not part of the answer",
    "logprobs_are_of_the_next_token": "a log-prob is that of a token given what is before it",
    "padding_is_not_seen": "padding changes no log-prob",
    "own_group_alone": "other groups do not change an advantage",
    "group_adds_up_to_zero": "the advantages of a group add up to 0",
    "unit_deviation": "the advantages of a group have a standard deviation of about 1",
    "equal_rewards_teach_nothing": "the advantages of equal rewards are 0",
    "good_tokens_rise": "the loss raises tokens with positive advantages and lowers the others",
    "only_the_mask_is_trained": "the loss has no gradient outside of the mask",
    "tokens_count_alike": "at ratio 1 all tokens have gradients in proportion to their advantage",
    "weights_add_up_to_one": "the weights of the tokens in the loss add up to 1",
    "gradient_has_the_ratio": "the gradient of a token grows with its own ratio",
    "clip_holds_back": "a token beyond the clip is pushed no further",
    "clip_lets_return": "a token that moved the wrong way is pushed back",
    "kl_pulls_back": "the KL penalty pulls the policy towards the reference, as k3 does",
    "old_is_fixed": "the old log-probs stay those from before the first step",
    "old_has_no_gradient": "the old and the reference's log-probs are constants",
    "rows_belong_together": "in a step, each answer has its own advantage, mask and reference",
    "each_row_once_per_pass": "each pass has each answer once",
    "a_step_follows_its_own_gradient": "a step follows the gradient of its own loss",
    "long_gradients_are_scaled": "a gradient longer than 1 is scaled to length 1 for its step",
    "answers_meet_their_questions": "an answer is rewarded for its own question",
    "only_answers_are_trained": "the mask has the tokens of the answers, and no others",
    "padding_is_marked": "the attention mask has the prompts' tokens and the answers', no others",
    "groups_share_a_question": "the G answers of a group answer one question",
    "updates_have_new_tasks": "each update has P tasks that no earlier one had",
    "evaluation_is_held_out": "no task of the evaluation is trained on",
    "evaluation_is_greedy": "the evaluation takes the policy's likeliest tokens; training draws",
    "draws_are_new": "each update has random numbers of its own",
    "accuracy_counts_the_right": "the accuracy is the fraction of right answers",
    "reference_stays": "the reference keeps the weights of the start",
    "optimizer_has_the_policy": "one optimizer has the policy's weights and a learning rate",
}
Answers = dict[str, bool]


def ask_all(module: ModuleType) -> dict[str, str]:
    """The facts that do not hold: name, and the error if it is one ("" if not)."""
    failed, silent = dict[str, str](), io.StringIO()
    for probe, names in PROBES.items():
        torch.manual_seed(0)
        try:
            with set_back(module), redirect_stdout(silent), redirect_stderr(silent):
                answers, error = probe(module), ""
        except Exception as raised:
            answers, error = {}, f"{type(raised).__name__}: {raised}"
        failed |= {name: error for name in names if not answers.get(name, False)}
    return failed


def reward(m: Any) -> Answers:
    spelled = "r1 a r2 <answer>{}</answer>".format
    pairs = [(spelled(2), 2, 1.0), (spelled(3), 1, 0.1), (spelled(12), 2, 0.1), ("r1 r2", 2, 0.0),
             ("", 0, 0.0), (spelled("two"), 2, 0.0), (spelled(2) + spelled(2), 2, 0.0)]  # fmt: skip
    zeros = [("<answer>0</answer>", 0, 1.0), ("<answer>0</answer>", 2, 0.1)]
    tasks = [m.ask(seed) for seed in range(20)]
    asked = [re.match('How many (.) in "(.*)"', question) for question, _ in tasks]
    known = [found and found[2].count(found[1]) for found in asked]
    return {
        "tasks_know_their_answer": known == [right for _, right in tasks],
        **{
            name: all(abs(m.reward(text, right) - earned) < 1e-6 for text, right, earned in cases)
            for name, cases in (("answer_is_between_tags", pairs), ("zero_is_an_answer", zeros))
        },
    }


def encode(m: Any) -> Answers:
    questions = ["How many r in strawberry?", "How many?"]
    ids, real = m.encode(questions)
    expected = [m.tokenizer.apply_chat_template(
        [{"role": "user", "content": q}], tokenize=True, add_generation_prompt=True,
        return_dict=False) for q in questions]  # fmt: skip
    return {
        "prompts_end_together": bool((real[:, -1] == 1).all()) and ids.shape == real.shape,
        "prompts_open_the_turn": [i[r == 1].tolist() for i, r in zip(ids, real, strict=True)]
        == [list(row) for row in expected],
    }


def sample(m: Any) -> Answers:
    m.END, m.PAD, m.MAX_TOKENS = 1, 0, 6
    model, prompt = random_model(max_passes=20), torch.tensor([[5, 3, 7]])
    many = prompt.expand(20_000, -1)
    tokens, mask = m.sample(model, many, torch.ones_like(many), False)
    first = tokens[:, 0].bincount(minlength=12)
    begun = first.scatter(0, torch.tensor(m.END), 0).argmax()  # the most frequent beginning
    second = tokens[tokens[:, 0] == begun, 1].bincount(minlength=12)
    with torch.no_grad():
        logits = model(prompt).logits[0]
        then = model(torch.cat([prompt, begun.view(1, 1)], 1)).logits[0, -1]

    def distance(counts: Tensor, expected: Tensor) -> float:
        return ((counts / counts.sum() - expected.softmax(-1)).abs().sum() / 2).item()

    ours = [t for t in temperatures(m) if distance(first, logits[-1] / t) < 0.015
            and distance(second, then / t) < 0.03]  # fmt: skip
    likeliest = m.sample(model, prompt, torch.ones_like(prompt), True)[0][0, 0]

    with torch.no_grad():
        found = m.token_logprobs(model, prompt, torch.ones_like(prompt), 2)
    theirs = {t: (logits[:-1] / t).log_softmax(-1)[[0, 1], prompt[0, 1:]] for t in temperatures(m)}
    trained = [t for t, right in theirs.items() if found.shape == (1, 2)
               and torch.allclose(found[0], right, atol=1e-4)]  # fmt: skip

    length, ends = tokens.shape[1], tokens == m.END
    end = torch.where(ends.any(1), ends.int().argmax(1), length)
    place = torch.arange(length)
    return {
        "answers_end": length == m.MAX_TOKENS
        or (length < m.MAX_TOKENS and bool(ends.any(1).all())),
        "draws_are_the_policys": bool(ours) and bool(likeliest == logits[-1].argmax()),
        "logprobs_are_of_the_next_token": bool(trained),
        "one_temperature": bool(set(ours or [m.TEMPERATURE]) & set(trained or [m.TEMPERATURE])),
        "end_is_trained": bool((mask[place <= end[:, None]] == 1).all()),
        "nothing_after_the_end": bool((mask[place > end[:, None]] == 0).all()),
    }


def padding(m: Any) -> Answers:
    model, row = random_model(), torch.tensor([[5, 3, 7, 2, 9]])
    padded = torch.tensor([[4, 4, 5, 3, 7, 2, 9], [6, 8, 5, 3, 7, 2, 9]])
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        alone = m.token_logprobs(model, row, torch.ones_like(row), 3)[0]
        among, other = m.token_logprobs(model, padded, real, 3)
    same = torch.allclose(alone, among, atol=1e-3)
    return {"padding_is_not_seen": same and not torch.allclose(alone, other, atol=1e-3)}


def group_advantages(m: Any) -> Answers:
    m.P, m.G = 3, 4
    rewards = torch.tensor([0.0, 1, 1, 0.1, 0, 0, 0.1, 0, 1, 1, 1, 1])
    other = torch.tensor([0.0, 1, 1, 0.1, 1, 0, 1, 0.1, 0, 0, 0, 0.1])
    groups = m.group_advantages(rewards).view(3, 4)
    deviations = groups[:2].std(1)
    return {
        "own_group_alone": torch.allclose(groups[0], m.group_advantages(other)[:4], atol=1e-4),
        "group_adds_up_to_zero": bool((groups.sum(1).abs() < 1e-4).all()),
        "unit_deviation": bool(((deviations > 0.8) & (deviations < 1.25)).all()),
        "equal_rewards_teach_nothing": bool((groups[2].abs() < 1e-3).all()),
    }


def compute_loss(m: Any) -> Answers:
    advantages = torch.tensor([1.0, -2.0])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    now = -torch.rand(2, 5) - 0.5

    def gradient(ratio: float | Tensor, ref: Tensor = now, signs: Tensor = advantages) -> Tensor:
        logprobs = now.clone().requires_grad_()
        old = now - torch.as_tensor(ratio).log()
        loss = m.compute_loss(logprobs, old, ref, signs, mask)[0]
        return torch.autograd.grad(loss, logprobs)[0]

    at_one, inside = gradient(1.0), mask == 1
    weights = (-at_one / advantages[:, None])[inside]  # of the tokens, if the gradient is w · A
    small, large = 1 - 1.5 * m.CLIP, 1 + 1.5 * m.CLIP
    up, down = inside & (advantages > 0)[:, None], inside & (advantages < 0)[:, None]
    pushed = bool(at_one[inside].any())
    nothing = torch.zeros(2)
    alone = torch.ones(2, 5)
    alone[1, 1] = 1.1
    with_ratio = gradient(alone)
    m.BETA = 0.1
    above, below = gradient(1.0, now - 0.5, nothing), gradient(1.0, now + 0.5, nothing)
    return {
        "good_tokens_rise": bool((weights > 0).all()),
        "only_the_mask_is_trained": not at_one[~inside].any(),
        "tokens_count_alike": bool((weights - weights.mean()).abs().max() < 1e-5),
        "weights_add_up_to_one": not pushed or abs(weights.abs().sum().item() - 1) < 1e-4,
        "gradient_has_the_ratio": torch.allclose(with_ratio, alone * at_one, atol=1e-6),
        "clip_holds_back": not gradient(large)[up].any() and not gradient(small)[down].any(),
        "clip_lets_return": not pushed
        or bool(gradient(small)[up].all() and gradient(large)[down].all()),
        # the derivative of k3 is 1 - reference / π
        "kl_pulls_back": bool((above[inside] > 0).all())
        and torch.allclose(above / (1 - math.exp(-0.5)), below / (1 - math.exp(0.5)), atol=1e-5),
    }


def update(m: Any) -> Answers:
    """Each of 8 answers has a length of its own, by which it is recognised in each step."""
    m.P, m.G, m.EPOCHS, m.MINIBATCHES = 2, 4, 2, 2
    model, reference = random_model(), random_model(seed=1).requires_grad_(False)
    ids = torch.randint(2, 12, (8, 11))
    mask = (torch.arange(8) <= torch.arange(8)[:, None]).long()
    attention = torch.cat([torch.ones(8, 3).long(), mask], 1)
    advantages = torch.tensor([0.9, -0.8, 0.7, -0.6, 0.5, -0.4, 0.3, -0.2])
    parameters = list(model.parameters())
    with torch.no_grad():
        old, ref = (m.token_logprobs(x, ids, attention, 8) for x in (model, reference))
    calls, expected, steps, right = [], [], list[Tensor](), m.compute_loss

    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        calls.append(inspect.signature(right).bind(*args, **kwargs).arguments)
        found = torch.autograd.grad(result[0], parameters, retain_graph=True, allow_unused=True)
        expected.append(flat(found, parameters))
        return result

    class Spy(torch.optim.SGD):
        """Notes the gradient of each step and moves the weights a little, at random."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            steps.append(flat([p.grad for p in parameters], parameters))
            with torch.no_grad():
                for parameter in parameters:
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)

    m.compute_loss = recorded
    m.update(model, reference, Spy(parameters, lr=0.0), ids, attention, mask, advantages)
    rows = [call["mask"].sum(1) - 1 for call in calls]
    passes = [torch.cat(rows[i : i + 2]).sort().values.tolist() for i in range(0, len(rows), 2)]

    def equal(name: str, whole: Tensor) -> bool:
        return all(torch.allclose(call[name].float(), whole[own].float(), atol=1e-4)
                   for call, own in zip(calls, rows, strict=True))  # fmt: skip

    pairs = list(zip(expected, steps, strict=False))
    return {
        "old_is_fixed": equal("old", old),
        "old_has_no_gradient": not any(c["old"].requires_grad or c["ref"].requires_grad
                                       for c in calls),
        "rows_belong_together": equal("advantages", advantages) and equal("ref", ref),
        "each_row_once_per_pass": passes == [list(range(8))] * 2,
        "a_step_follows_its_own_gradient": len(steps) == len(calls) == 4
        and all(torch.cosine_similarity(a, b, dim=0) > 0.999 or not a.any() for a, b in pairs),
        "long_gradients_are_scaled": all(abs(step.norm() - own.norm().clamp(max=1)) < 0.01
                                         for own, step in pairs),
    }  # fmt: skip


def train(m: Any) -> Answers:
    """A run without a model: every other answer is right, and an update only marks the policy."""
    own, notes = dict(vars(m)), defaultdict[str, list[Any]](list)
    rights = dict[str, int]()  # by question
    length = len(m.tokenizer.encode("<answer>1</answer>")) + 1

    def ask(seed: int) -> tuple[str, int]:
        question, right = own["ask"](seed)
        rights[question] = right
        notes["seeds"].append(seed)
        return question, right

    def encode(questions: list[str]) -> Any:
        notes["questions"] = list(questions)
        return own["encode"](questions)

    def sample(model: Any, ids: Tensor, attention: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
        """Answers of `length` tokens, and what was sampled after them."""
        numbers = [rights[q] + i % 2 for i, q in enumerate(notes["questions"])]
        rows = [[*m.tokenizer.encode(f"<answer>{n}</answer>"), m.END] for n in numbers]
        after = m.tokenizer.encode("9</answer>")
        mask = torch.tensor([1] * length + [0] * len(after)).expand(len(rows), -1)
        notes["attention"] = [torch.cat([attention, mask], 1)]
        notes["greedy" if notes["evaluating"] else "drawn"].append(greedy)
        if not notes["evaluating"]:
            notes["noise"].append(torch.rand(()).item())
        return torch.tensor([row + after for row in rows]), mask

    def reward(text: str, right: int) -> float:
        return 1.0 if text.strip() == f"<answer>{right}</answer>" else 0.1

    def group_advantages(rewards: Tensor) -> Tensor:
        expected = torch.tensor([1.0, 0.1]).repeat(len(rewards) // 2)
        notes["halves"].append(torch.allclose(rewards, expected))
        return own["group_advantages"](rewards)

    def evaluate(*args: Any, **kwargs: Any) -> float:
        notes["seeds"], notes["evaluating"] = [], [True]
        notes["judged"].append(id(args[0] if args else kwargs["model"]))
        accuracy = own["evaluate"](*args, **kwargs)
        notes["held out"] += notes.pop("seeds")
        notes["evaluating"] = []
        return accuracy

    def update(*args: Any, **kwargs: Any) -> dict[str, float]:
        call = inspect.signature(own["update"]).bind(*args, **kwargs).arguments
        policy, weights = call["model"], next(call["model"].parameters())
        if not notes["start"]:
            notes["start"].append(weights.detach().clone())
        notes["stays"].append(torch.equal(next(call["reference"].parameters()), notes["start"][0]))
        with torch.no_grad():
            weights += 1
        groups = call["optimizer"].param_groups
        trained = {id(p) for group in groups for p in group["params"]}
        has_rate = all(group["lr"] > 0 for group in groups)
        notes["owned"].append(has_rate and trained == {id(p) for p in policy.parameters()})
        notes["optimizers"].append(call["optimizer"])
        notes["policies"].append(id(policy))
        notes["marked"].append(bool((call["attention"] == notes["attention"][0]).all()))
        notes["tasks"].append(set(notes.pop("seeds")))
        notes["masks"].append(call["mask"])
        questions = notes["questions"]
        notes["groups"] += [questions[i : i + m.G] for i in range(0, len(questions), m.G)]
        return {"kl": 0.0, "clipped": 0.0, "gradient": 0.0}

    for function in (ask, encode, sample, reward, group_advantages, evaluate, update):
        setattr(m, function.__name__, function)
    accuracies = m.train()
    tasks = set().union(*notes["tasks"])
    return {
        "answers_meet_their_questions": bool(notes["halves"]) and all(notes["halves"]),
        "only_answers_are_trained": all(mask.sum(1).eq(length).all() for mask in notes["masks"]),
        "padding_is_marked": all(notes["marked"]),
        "groups_share_a_question": all(len(set(group)) == 1 for group in notes["groups"]),
        "updates_have_new_tasks": [len(t) for t in notes["tasks"]] == [m.P] * m.UPDATES
        and len(tasks) == m.P * m.UPDATES,
        "evaluation_is_held_out": bool(notes["held out"]) and not tasks & {*notes["held out"]},
        "accuracy_counts_the_right": all(abs(a - 0.5) < 0.01 for a in accuracies),
        "evaluation_is_greedy": all(notes["greedy"])
        and not any(notes["drawn"])
        and set(notes["judged"]) == set(notes["policies"]),
        "draws_are_new": len(set(notes["noise"])) == len(notes["noise"]),
        "reference_stays": all(notes["stays"]),
        "optimizer_has_the_policy": all(notes["owned"]) and len(set(notes["optimizers"])) == 1,
    }


PROBES: dict[Callable[[Any], Answers], list[str]] = {
    reward: ["answer_is_between_tags", "tasks_know_their_answer", "zero_is_an_answer"],
    encode: ["prompts_end_together", "prompts_open_the_turn"],
    sample: ["answers_end", "draws_are_the_policys", "one_temperature", "end_is_trained",
             "nothing_after_the_end", "logprobs_are_of_the_next_token"],
    padding: ["padding_is_not_seen"],
    group_advantages: ["own_group_alone", "group_adds_up_to_zero", "unit_deviation",
                       "equal_rewards_teach_nothing"],
    compute_loss: ["good_tokens_rise", "only_the_mask_is_trained", "tokens_count_alike",
                   "weights_add_up_to_one", "gradient_has_the_ratio", "clip_holds_back",
                   "clip_lets_return", "kl_pulls_back"],
    update: ["old_is_fixed", "old_has_no_gradient", "rows_belong_together",
             "each_row_once_per_pass", "a_step_follows_its_own_gradient",
             "long_gradients_are_scaled"],
    train: ["answers_meet_their_questions", "only_answers_are_trained", "padding_is_marked",
            "groups_share_a_question", "updates_have_new_tasks", "evaluation_is_held_out",
            "evaluation_is_greedy", "draws_are_new", "accuracy_counts_the_right",
            "reference_stays", "optimizer_has_the_policy"],
}  # fmt: skip


@contextmanager
def set_back(module: ModuleType) -> Iterator[None]:
    """Gives the module its own functions and constants back at the end."""
    own = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(own)


def temperatures(m: Any) -> tuple[float, ...]:
    return (m.TEMPERATURE, 1.0, 1 / m.TEMPERATURE)


def random_model(seed: int = 0, max_passes: int = 1000) -> Qwen3ForCausalLM:
    """A model of 12 tokens whose probabilities are far from equal. After `max_passes` it raises
    RuntimeError, which ends an endless loop."""
    config = Qwen3Config(
        vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.6, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).eval()
    left = iter(range(max_passes))

    def count(*_: Any) -> None:
        if next(left, None) is None:
            raise RuntimeError("the model was called too often: does the loop over tokens end?")

    model.register_forward_pre_hook(count)
    return model


def flat(gradients: Any, parameters: list[Any]) -> Tensor:
    """One vector of all gradients; a missing one is 0."""
    return torch.cat([
        (torch.zeros_like(p) if g is None else g.detach()).flatten()
        for g, p in zip(gradients, parameters, strict=True)
    ]).clone()  # fmt: skip
