"""What waits: an environment whose steps take 200 ms, and an agent whose tool takes 1 s."""

import re
import time
from typing import Any

from environments.base import Env, Message, Step
from environments.letter_counting import LetterCounting


class Steps(Env):
    """Questions of letter_counting in a dialogue; a step takes `seconds`, as a page would."""

    def __init__(self, seconds: float = 0.2, questions: int = 8):
        self.seconds, self.questions, self.question = seconds, questions, LetterCounting()

    def reset(self, seed: int) -> list[Message]:
        self.seeds = [*range(seed, seed + self.questions)]
        return self.question.reset(self.seeds.pop(0))

    def step(self, response: str) -> Step:
        time.sleep(self.seconds)
        found = self.question.step(response)
        if not self.seeds:
            return found
        [question] = self.question.reset(self.seeds.pop(0))
        return Step(question, found.reward, False, found.info)


def agent(task: dict, client: Any) -> float:
    """Asks, uses a tool that takes `task["seconds"]`, and asks again."""
    messages = [{"role": "user", "content": task["question"]}]
    for turn in range(2):
        answer = client.chat.completions.create(model="picorl", messages=messages)
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        if turn == 0:
            time.sleep(task["seconds"])
            messages.append({"role": "user", "content": "The tool says: 42."})
    return len(re.findall("[aeiou]", text)) / max(1, len(text))
