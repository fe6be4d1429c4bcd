"""An evening on episodes, 1 of 2. The context of an agent: its chat, as messages and as token ids.

    messages → prompt ids → completion → the next message → longer prompt ids → ...

The ids of a completion are kept as they were sampled, and only the messages after them are
tokenized. So the policy is trained on exactly what it saw. A context grows from turn to turn, until
an environment begins a fresh one. A `Renderer` turns messages into ids.

An episode (core/episodes.py) calls an `Agent` in this order. Two things are rare: a *prefill*, the
beginning of an answer that the environment gives, and `add_feedback`, for --algo sdpo.

    begin(messages)     the opening messages
    set_prompt()        the ids of the next prompt, `prompt_ids`, which is then sampled after
    add(completion)     a Turn with the sampled ids; the text of the answer, for the environment
    read(step)          the reward of this turn, and the next message; then again from set_prompt
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from core.chat_template import (
    RAW,
    Schema,
    accepts_system,
    as_hermes,
    clean_message,
    in_format_of,
    next_prompt_ids,
    num_embeddings,
    prompt_ids,
    with_prefill,
    with_system,
)
from core.faults import UsageError
from core.policy import Policy
from core.types import Completion, Message, Rollout, Turn
from environments.base import EnvFailure, Response, Step

MAX_OPENINGS = 1000  # prompts that a renderer keeps


class Renderer:
    """Renders messages to token ids, with the chat template of a policy."""

    def __init__(self, policy: Policy, system_prompt: str = ""):
        """`system_prompt`: comes before the first message of every context. Raises UsageError if
        the chat template has no system messages."""
        if system_prompt and not accepts_system(policy.tokenizer):
            raise UsageError("--system-prompt: the chat template has no system messages; remove it")
        self.policy, self.system_prompt = policy, system_prompt
        self.rendered = lru_cache(MAX_OPENINGS)(
            lambda chat_and_schemas: prompt_ids(policy.tokenizer, *json.loads(chat_and_schemas))
        )

    def opening_ids(self, chat: list[Message], schemas: Sequence[Schema]) -> list[int]:
        """The ids of a prompt that begins a context.

        The rollouts of a group share it, and all evaluations do; it is rendered once. Raises
        UsageError or TypeError if it cannot be.
        """
        return self.rendered(json.dumps([chat, schemas]))

    def demonstration(self, text: str) -> Completion:
        """A demonstration as if the policy had sampled it, with log-probs of 0. Raises UsageError
        for a token that was added to the tokenizer and that the model has no embedding of."""
        tokenizer = self.policy.tokenizer
        text = in_format_of(tokenizer, text)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if max(ids, default=0) >= num_embeddings(tokenizer):
            token = tokenizer.decode([max(ids)])
            raise UsageError(f"a demonstration has {token!r}, which has no embedding in the model")
        ids.append(self.policy.end_of_turn_id)
        return Completion(ids, [0.0] * len(ids), text, "stop")


@dataclass(eq=False)
class Agent:
    """One agent of an episode: its rollout, and its context as messages and as token ids."""

    renderer: Renderer
    rollout: Rollout
    stream: int = 0  # random stream of its completions
    schemas: Sequence[Schema] = ()  # of the tools that it may call
    chat: list[Message] = field(default_factory=list)  # messages in the context
    context_ids: list[int] = field(default_factory=list)  # of the chat up to the last completion
    num_seen: int = 0  # number of messages that `context_ids` has
    num_opening: int = 0  # number of ids of the prompt with which the context began
    prompt_ids: list[int] = field(default_factory=list)  # next prompt; empty: not asked to act
    context_full: bool = False  # a message did not fit, so the agent cannot act any more
    step: Step | None = None  # the last Step that the agent got
    last_prefill: str = ""  # the prefill of its last answer

    def begin(self, messages: list[Message]) -> None:
        """Begins a context with these messages, and the system prompt before them."""
        self.chat, self.context_ids, self.context_full = [], [], False
        messages = [clean_message(message) for message in messages]
        if self.renderer.system_prompt and messages and messages[0]["role"] == RAW:
            raise UsageError("--system-prompt: a raw prompt has no system message; remove it")
        if self.renderer.system_prompt and messages:
            tokenizer = self.renderer.policy.tokenizer
            messages = with_system(tokenizer, messages, self.renderer.system_prompt)
        self._extend(messages)

    def add(self, answer: Completion | str | None) -> Response:
        """Appends a completion, sampled after `prompt_ids`, or a demonstration. Returns its text.

        The text of the answer begins with the prefill, if the prompt ended with one. Raises
        EnvFailure if the sampler failed, TypeError if there is no demonstration.
        """
        if answer is None:
            raise TypeError("the environment has no demonstration")
        if isinstance(answer, str):
            answer = self.renderer.demonstration(answer)
        if answer.finish_reason == "error":
            raise EnvFailure(answer.text)
        prompt, ids = self.prompt_ids, answer.token_ids
        # training uses the ids exactly as they were sampled, in the context that they had
        turn = Turn(prompt, ids, answer.logprobs, answer.finish_reason, kept_ids=answer.kept_ids)
        self.rollout.turns.append(turn)
        self.last_prefill = self.prefill
        text = self.last_prefill + answer.text
        if self.last_prefill:  # `text` takes the place of the message with the prefill
            del self.chat[-1], self.rollout.messages[-1]
        self._extend([{"role": "assistant", "content": text}])
        self.num_opening = self.num_opening if self.context_ids else len(prompt)
        self.context_ids, self.prompt_ids, self.num_seen = prompt + ids, [], len(self.chat)
        tokenizer = self.renderer.policy.tokenizer
        response = Response(as_hermes(tokenizer, text) if self.schemas else text)
        response.token_ids = self.context_ids[self.num_opening :]
        return response

    def add_feedback(self, right_answer: str | None) -> None:
        """For --algo sdpo: gives the last turn `feedback_ids`, the prompt of its teacher.

        The prompt is that of the turn, then `right_answer`, then the same question once more; [] if
        that exceeds the context. core/feedback.py computes the teacher's log-probs after it.
        """
        if not right_answer:
            return
        turn, question = self.rollout.turns[-1], self.chat[-2]
        teacher = Agent(self.renderer, Rollout("", "", 0, 0), schemas=self.schemas)
        teacher.chat, teacher.prompt_ids = self.chat[:-1], turn.prompt_ids
        teacher.add(right_answer)
        teacher.read(Step(question, 0.0, done=False))
        policy, ids = self.renderer.policy, teacher.prompt_ids
        if ids and self.last_prefill:
            ids = with_prefill(policy.tokenizer, ids, self.last_prefill)
        turn.feedback_ids = ids if len(ids) + len(turn.completion_ids) <= policy.max_length else []

    def read(self, step: Step) -> None:
        """Adds the reward to the last turn, and makes a prompt of the next message."""
        self.step = step
        if self.rollout.turns:
            self.rollout.turns[-1].reward += step.reward
        self.rollout.info = step.info or self.rollout.info
        self.rollout.episode_truncated = step.truncated or not step.done
        if step.message is None:
            return
        if step.fresh:
            self.begin([step.message])
        else:
            self._extend([clean_message(message) for message in step.messages])
        if not step.done and not self.context_full:
            self.set_prompt()

    @property
    def prefill(self) -> str:
        """The beginning of the answer, where an environment's opening messages end with it."""
        opening = [] if self.context_ids else self.chat[-1:]
        if any("tool_calls" in message for message in opening):
            raise UsageError("a prompt ends with a call of a tool: add its result, or leave it out")
        return "".join(m["content"] for m in opening if m["role"] == "assistant")

    def set_prompt(self) -> None:
        """Renders the new messages, unless the context is full: then sets `context_full`.

        Raises UsageError if the new messages alone exceed the context.
        """
        policy, schemas = self.renderer.policy, self.schemas
        if self.context_ids:
            if self.chat[0]["role"] == RAW:
                raise UsageError("a raw prompt has one answer: nothing says what follows it")
            new = self.chat[self.num_seen :]
            ids = next_prompt_ids(policy.tokenizer, self.context_ids, new, policy.stop_ids, schemas)
        elif prefill := self.prefill:
            ids = self.renderer.opening_ids(self.chat[:-1], schemas)
            ids = with_prefill(policy.tokenizer, ids, prefill)
        else:
            ids = self.renderer.opening_ids(self.chat, schemas)
        num_new = len(ids) - len(self.context_ids)
        is_result = self.chat[-1]["role"] == "tool"  # the policy may have asked for a long one
        if num_new >= policy.max_length and not is_result:
            context = f"the context of an episode has {policy.max_length} ({policy.limited_by})"
            raise UsageError(f"one message has {num_new} tokens; {context}")
        self.context_full = len(ids) >= policy.max_length
        self.prompt_ids = [] if self.context_full else ids

    def _extend(self, messages: list[Message]) -> None:
        self.rollout.messages += messages
        self.chat += messages
