"""Writes a GRPO run with one fault, and checks whether it is repaired.

    python -m core.workshop.drill           # writes drill.py; --seed 2 .. 12: another fault
    python drill.py                         # runs it: ten updates, about a minute
    python -m core.workshop.drill --check   # checks the repair; if it is right, names the fault

The check compares what five functions return with those of grpo_on_one_page.py, so every
right repair counts. There is no fault in the others, and it does not look at them.
"""

import argparse
import copy
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from core.faults import UsageError
from core.tiny import PRETRAINED
from core.workshop import grpo_on_one_page as page
from core.workshop.checker import cached_answer, difference, load
from core.workshop.exercises import Fact
from environments.letter_counting import LetterCounting

RIGHT = Path(page.__file__)
TITLE = '''"""Drill {}: this GRPO run raises no error, and is wrong in one place. Repair it.
Keep all names and constants; the docstrings are right."""'''
FAULTS = """
maximum: The clip holds no token back, and lets none return (tensorforce #106)
  torch.minimum(  =>  torch.maximum(
gradients_add_up: A step follows the gradients of all steps before it, too (TRL #583)
  optimizer.zero_grad()  =>  ⏎
padding_is_seen: Without the attention mask the trainer reads the padding as text (TRL #2708)
  (ids, attention_mask=attention)  =>  (ids)
mean_of_row_means: A token of a long answer counts less (Dr. GRPO, arXiv:2503.20783)
  (surrogate * mask).sum() / mask.sum()  =>  (surrogate * mask).sum(1).div(mask.sum(1)).mean()
off_by_one: A token is looked up in the logits that have seen it (prime-rl #1525)
  [:, -n - 1 : -1]  =>  [:, -n:]
groups_interleaved: A group has answers to different questions (prime-rl #600)
  rewards.view(-1, G)  =>  rewards.view(G, -1).T
advantages_not_shuffled: Rows are shuffled, and their advantages are not (ddpo-pytorch #29)
  advantages[rows]  =>  advantages[: len(rows)]
deviation_of_the_batch: Groups whose rewards differ little hardly count (flow_grpo #46)
  groups.std(1, keepdim=True)  =>  groups.std()
old_is_renewed: The ratio is 1 in every step, and nothing clips (tensorforce #312)
  (logprobs, old[rows],  =>  (logprobs, logprobs.detach(),
temperature_left_out: Log-probs are those at temperature 1, answers are not (TRL #3029)
  -n - 1 : -1] / TEMPERATURE  =>  -n - 1 : -1]
mean_with_padding: One long answer shrinks the step of all (SkyRL #462)
  -(surrogate * mask).sum() / mask.sum()  =>  -(surrogate * mask).mean()
end_left_out: The policy does not learn to stop (TRL #1623)
  (ends.cumsum(1) - ends == 0)  =>  (ends.cumsum(1) == 0)
"""  # of drills 1 to 12: the name, what is wrong (who reported it), the right text => the wrong one
ALL = re.findall(r"^(\w+): (.*)\n +(.*)  =>  (.*)$", FAULTS, re.MULTILINE)
POLICY = AutoModelForCausalLM.from_pretrained(PRETRAINED)
IDS = torch.arange(100, 164).view(8, 8)  # 8 prompts of 3 tokens, and their answers
LOGPROBS = torch.tensor([[-1.0, -0.5, -2.0, -0.7, -0.2], [-0.3, -1.5, -0.9, -1.1, -0.4]])
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
A = torch.tensor([1.0, -2.0])
RATIOS = torch.tensor([1.5, 0.5, 1.0, 1.1, 0.9])  # above the clip, below it, within it


def answers(run: Any) -> tuple[Tensor, Tensor]:
    """The greedy answers to 8 questions, and their mask; `run`: the module, here and below."""
    prompts = run.encode([LetterCounting().reset(seed)[0]["content"] for seed in range(8)])
    tokens, mask = run.sample(POLICY, *prompts, True)
    return tokens * mask, mask * 1


def logprobs(run: Any, padding: int) -> Tensor:
    attention = torch.ones_like(IDS).index_fill(1, torch.arange(padding), 0)
    return run.token_logprobs(POLICY, IDS, attention, 4).detach()


def advantages(run: Any) -> tuple[Tensor, Tensor]:
    """The advantages of three groups, in units of the first, and their deviations: 1, or 0."""
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    computed = run.group_advantages(torch.cat([rewards, rewards.roll(1) * 0.4, torch.ones(8)]))
    return computed / computed[0].abs(), computed.view(3, 8).std(1).round()


def gradient(run: Any, ratio: Any) -> Tensor:
    """The gradient of the loss by the log-probs; `ratio` is π / π_old."""
    leaf = LOGPROBS.clone().requires_grad_()
    old = LOGPROBS - torch.as_tensor(ratio).log()
    return torch.autograd.grad(run.compute_loss(leaf, old, A, MASK), leaf)[0]


def updated(run: Any, epochs: int, rate: float, scale: float) -> Tensor:
    """Log-probs after one step in each epoch, so that the order of rows does not matter."""
    model, attention = copy.deepcopy(POLICY), torch.ones_like(IDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    signs = (torch.arange(8.0) - 3) * scale
    torch.manual_seed(0)
    with patch.multiple(run, EPOCHS=epochs, MINIBATCHES=1):
        run.update(model, optimizer, IDS, attention, attention[:, 3:], signs)
    return run.token_logprobs(model, IDS, attention, 5).detach()


FACTS = (
    Fact("the mask has an answer's tokens to its END, and END", (), answers),
    Fact("log-probs are of softmax(logits before / TEMPERATURE)", (0,), logprobs),
    Fact("padding changes no log-prob", (2,), logprobs),
    Fact("advantages are (R - mean) / deviation of the own group", (), advantages, 2e-3),
    Fact("at ratio 1 a gradient is -A / number of all tokens", (1.0,), gradient),
    Fact("beyond the clip only the way back has a gradient", (RATIOS,), gradient),
    Fact("in a step an answer has its own advantage", (1, 0.1, 1.0), updated, 0.01),
    Fact("a step follows its own gradient", (2, 1e-3, 0.01), updated, 2e-3),
    Fact("π_old is of before the first step", (2, 0.01, 1.0), updated, 0.01),
)


def drill(seed: int) -> str:
    _, _, right, wrong = ALL[seed - 1]
    source = RIGHT.read_text(encoding="utf-8")
    assert source.count(right) == 1, right
    broken = source.replace(right, wrong).replace(" " * 12 + "⏎\n", "")
    return re.sub(r'^""".*?"""', TITLE.format(seed), broken, count=1, flags=re.DOTALL)


def check(module: ModuleType) -> str:
    """A sentence with the first fact that does not hold, and the difference; "" if all hold."""
    for fact in FACTS:
        if differs := difference(cached_answer(fact, page), fact.answer(module), fact.tolerance):
            return f"This does not hold yet: {fact.statement} ({differs})."
    return ""


def execute(arguments: list[str]) -> int:
    """Returns the exit code: 0, or 1 if a fact does not hold; a mistake exits with 2."""
    parser = argparse.ArgumentParser("python -m core.workshop.drill")
    parser.add_argument("--seed", type=int, choices=range(1, 13), default=1, help="fault")
    parser.add_argument("--check", action="store_true", help="whether it is repaired")
    options, file = parser.parse_args(arguments), Path("drill.py")
    if not options.check:
        if file.exists():
            parser.error(f"{file} is there: rename or delete it; --seed 1 to 12 chooses a fault")
        file.write_text(drill(options.seed), encoding="utf-8", newline="\n")
        print(f"Wrote {file}. Run it, read it, repair it; --check says whether it is right.")
        return 0
    if not file.exists():
        parser.error(f"there is no {file}: python -m core.workshop.drill writes it")
    title = re.match(r'"""Drill (\d+):', file.read_text(encoding="utf-8"))
    if not title:
        parser.error(f"the first line of {file} must begin with the drill's number")
    try:
        failed = check(load(file))
    except UsageError as error:
        parser.error(f"{file}: {error}")
    name, cause, _, _ = ALL[int(title[1]) - 1]
    print(failed or f"Right. The fault was {name}: {cause}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(execute(sys.argv[1:]))
