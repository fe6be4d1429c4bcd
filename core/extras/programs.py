"""An episode whose agent is a program that asks over HTTP (environments/adapters/agent.py).

The program sends whole conversations, as messages; the policy must be trained on the token ids that
it sampled. `Conversations` stores the ids of every answer. A request whose messages begin with a
stored conversation continues its ids, and only the new messages are rendered. An edited history, a
summary, a second agent or a parallel call begins a context of its own, or continues an earlier one.
So a rollout is a tree of contexts, in which each sampled token occurs once, after exactly the ids
that it was sampled after.

Messages are compared as clients send them back: role, text without the spaces around it, calls as
JSON. Ids of calls, thoughts and the exact text only choose between answers that are equal in this.
"""

import json
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from core.chat_template import (
    as_hermes,
    clean_message,
    next_prompt_ids,
    read_calls,
    with_system,
    without_tools,
)
from core.context import Agent, Renderer
from core.episodes import Answerer, Episode, Play, RolloutCollector, error_text
from core.faults import UsageError
from core.pool import EnvCall
from core.sampler import Request
from core.seeds import derive_seed
from core.types import Completion, Message, Rollout, Turn
from environments.adapters.endpoint import Ask, Choice, Refused
from environments.base import PLAYER, EnvFailure
from environments.plumbing.tools import END_OF_THOUGHT, OPENING, after_thoughts, name_of

Key = tuple[str, ...]  # of a conversation: tools and schema, and the `message_key` of each message
SCHEMA = "Answer with JSON of this schema, and nothing else:\n{}"


def play_program(collector: RolloutCollector, episode: Episode, answerer: Answerer) -> Play:
    """One episode of a program, from its first request to its reward."""
    yield [EnvCall(episode.env, episode.env.reset, (episode.task.seed,))]
    program: Any = episode.env.built
    agent = collector.join(episode, PLAYER)
    rollout = agent.rollout
    conversations = Conversations(collector.renderer)
    while program.asks:
        sampled: list[tuple[Ask, Prompt, Request]] = []
        for ask in program.asks:
            try:
                prompt = conversations.prompt(ask)
                if len(rollout.turns) + len(sampled) + ask.n > collector.max_turns:
                    limit = f"the episode has had its {collector.max_turns} turns (--max-turns)"
                    raise Refused(limit, "max_turns")
            except (Refused, UsageError, TypeError, RecursionError) as error:
                program.over_limit |= isinstance(error, Refused)  # others are of the template
                ask.refuse(error)
                continue
            for _ in range(ask.n):
                stream = conversations.stream(agent.stream, prompt.ids)
                caller = Agent(collector.renderer, rollout, stream, chat=prompt.chat)
                caller.prompt_ids = prompt.ids
                request = answerer(episode, caller)
                assert isinstance(request, Request)
                request.max_tokens = min(request.max_tokens, ask.max_tokens or request.max_tokens)
                stop = (*request.params.stop, *ask.stop)
                request.params = replace(request.params, stop=stop)
                sampled.append((ask, prompt, request))
        completions = (yield [request for _, _, request in sampled]) if sampled else []
        for (ask, prompt, _), completion in zip(sampled, completions, strict=True):
            if completion.finish_reason == "error":
                raise EnvFailure(completion.text)
            prompt.choices.append(conversations.add(ask, prompt, completion, rollout))
            if len(prompt.choices) == ask.n:
                ask.reply(prompt.choices, len(prompt.ids))
        [steps] = yield [EnvCall(episode.env, episode.env.step, ({PLAYER: ""},))]
    if program.error:
        text = error_text(program.error).removeprefix("ProgramError: ")
        error_name = text.partition(":")[0]
        if error_name not in collector.agent_errors:
            collector.agent_errors.add(error_name)
            collector.say(
                f"an agent ended with {text}; such episodes earn the lowest reward. If the policy "
                "is not the cause, correct it, or raise environments.base.EnvFailure"
            )
    if len(program.turns) > len(rollout.turns):
        raise ValueError(f"{len(program.turns)} rewards in `turns`, and {len(rollout.turns)} turns")
    for turn, reward in zip(rollout.turns, program.turns, strict=False):
        turn.reward = reward
    agent.prompt_ids = []
    agent.read(steps[PLAYER])


@dataclass(eq=False)
class Prompt:
    """The prompt of a request, and its answers so far."""

    ids: list[int]
    chat: list[Message]  # as the template renders it, for a server
    new: list[Message]  # messages that the log does not have yet
    key: Key
    choices: list[Choice] = field(default_factory=list)


class Conversations:
    """The conversations of one episode."""

    def __init__(self, renderer: Renderer):
        self.renderer, self.policy = renderer, renderer.policy
        # the ids up to the end of an answer, by the conversation's Key and the answer's `exact_key`
        self.ids_after: dict[Key, dict[Key, list[int]]] = defaultdict(dict)
        self.prompt_counts = Counter[int]()  # by the checksum of the prompt

    def prompt(self, ask: Ask) -> Prompt:
        """The prompt of a request. Raises UsageError if the template refuses its messages, and
        Refused if it is longer than the context."""
        tokenizer, limit = self.policy.tokenizer, self.policy.max_length
        messages: list[Any] = ask.messages
        whole = chat = [clean_message(message) for message in messages]
        key = (json.dumps([ask.tools, ask.schema], sort_keys=True), *map(message_key, chat))
        if ask.schema:
            schema = SCHEMA.format(json.dumps(ask.schema, ensure_ascii=False))
            whole = with_system(tokenizer, whole, schema, last=True)
        if self.renderer.system_prompt:
            whole = with_system(tokenizer, whole, self.renderer.system_prompt)
        end = len(messages) - 1  # of the longest stored beginning; at least one message is new
        while end and key[: end + 1] not in self.ids_after:
            end -= 1
        if not end:
            ids = self.renderer.opening_ids(whole, ask.tools)
        else:
            alike = self.ids_after[key[: end + 1]]
            ids = alike.get(exact_key(messages[end - 1])) or [*alike.values()][-1]
            stop_ids = self.policy.stop_ids
            ids = next_prompt_ids(tokenizer, ids, chat[end:], stop_ids, ask.tools)
        if len(ids) >= limit:
            reason = f"{len(ids)} tokens do not fit into {limit} (--max-model-len)"
            raise Refused(reason, "context_length_exceeded")
        return Prompt(ids, without_tools(tokenizer, whole, ask.tools), chat[end:], key)

    def stream(self, agent: int, ids: list[int]) -> int:
        """The random stream of a request, by its prompt and how often that came before. So it does
        not depend on the order in which parallel requests arrive."""
        checksum = zlib.crc32(json.dumps(ids).encode())
        self.prompt_counts[checksum] += 1
        return derive_seed(agent, checksum, self.prompt_counts[checksum])

    def add(self, ask: Ask, prompt: Prompt, completion: Completion, rollout: Rollout) -> Choice:
        """Adds a turn with the completion to the rollout; returns the answer to the request."""
        choice = self.choice(ask, completion, f"{ask.id[:8]}{len(rollout.turns)}")
        answer: Any = choice.message
        ids = prompt.ids + completion.token_ids
        alike = self.ids_after[*prompt.key, message_key(clean_message(answer))]
        alike.pop(exact_key(answer), None)  # so that the latest is the last
        alike[exact_key(answer)] = ids
        tools = rollout.for_log.setdefault("tools", [])
        tools += [name for name in map(name_of, ask.tools) if name not in tools]
        turn = Turn(prompt.ids, completion.token_ids, completion.logprobs, completion.finish_reason)
        turn.kept_ids = completion.kept_ids
        rollout.turns.append(turn)
        rollout.messages += [*prompt.new, {"role": "assistant", "content": completion.text}]
        prompt.new = []
        return choice

    def choice(self, ask: Ask, completion: Completion, number: str) -> Choice:
        """A completion as the client reads it: its thought, its text and its calls."""
        tokenizer, text = self.policy.tokenizer, completion.text
        for stop in ask.stop:
            text = text.partition(stop)[0]
        text = as_hermes(tokenizer, text) if ask.tools else text
        content = after_thoughts(text)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if END_OF_THOUGHT in text:
            message["reasoning_content"] = text[: len(text) - len(content)].strip()
        calls = list[dict[str, Any]]()
        for name, arguments in read_calls(tokenizer, text) if ask.tools else ():
            if name:  # a call without a name could not be read
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                call_id = f"call_{number}_{len(calls)}"
                calls.append({"id": call_id, "type": "function", "function": function})
        if calls:
            text_before = content.partition(OPENING)[0].strip()
            message |= {"content": text_before or None, "tool_calls": calls}
        texts = [""] * len(completion.token_ids)
        if ask.body.get("logprobs"):
            texts = [str(tokenizer.decode([i])) for i in completion.token_ids]
        tokens = list(zip(texts, completion.logprobs, strict=True))
        return Choice(message, "tool_calls" if calls else completion.finish_reason, tokens)


def message_key(message: Message) -> str:
    """The parts of a message that a client sends back unchanged, unless it has edited them."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], message["content"].strip(), functions], sort_keys=True)


def exact_key(answer: dict[str, Any]) -> Key:
    """The ids of calls, or the text and the thought: they differ where `message_key` is equal."""
    ids = tuple(call.get("id", "") for call in answer.get("tool_calls") or ())
    return ids or (answer["content"], answer.get("reasoning_content") or "")
