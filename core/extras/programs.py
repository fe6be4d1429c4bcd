"""An episode whose agent is a program that asks over HTTP (environments/adapters/agent.py).

The program sends whole conversations, as messages; the policy must be trained on the token ids that
it sampled. `Conversations` remembers the ids of every answer. A request whose messages begin with a
known conversation continues its ids, and only what is new is rendered. An edited history, a
summary, a second agent or a parallel call begins a context of its own, or continues an earlier one.
So a rollout is a tree of contexts, in which each sampled token stands once, after exactly the ids
that it was sampled after.

Messages are compared as clients send them back: role, text without the spaces around it, calls as
JSON. Ids of calls, thoughts and the exact text only choose between answers that read alike.
"""

import json
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from core.chat_template import (
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
from environments.plumbing.tools import END_OF_THOUGHT, OPENING, name_of, spoken

Key = tuple[str, ...]  # of a conversation: tools and schema, and what each message reads like
SCHEMA = "Answer with JSON of this schema, and nothing else:\n{}"


def play_program(collector: RolloutCollector, episode: Episode, answerer: Answerer) -> Play:
    """One episode of a program, from its first request to its reward."""
    yield [EnvCall(episode.env, episode.env.reset, (episode.task.seed,))]
    program: Any = episode.env.made
    say_once = collector.say_once
    agent = collector.join(episode, PLAYER)
    rollout, known = agent.rollout, Conversations(collector.renderer)
    while program.asks:
        sampled: list[tuple[Ask, Prompt, Request]] = []
        for ask in program.asks:
            try:
                prompt = known.prompt(ask)
                if len(rollout.turns) + len(sampled) + ask.n > collector.max_turns:
                    limit = f"the episode has had its {collector.max_turns} turns (--max-turns)"
                    raise Refused(400, limit, "max_turns")
            except Refused as error:
                program.refuse(ask, str(error), error.code)
                continue
            except (UsageError, TypeError, RecursionError) as error:  # of the template
                ask.refuse(400, str(error))
                continue
            for _ in range(ask.n):
                stream = known.stream(agent.stream, prompt.ids)
                asking = Agent(collector.renderer, rollout, stream, chat=prompt.chat)
                asking.prompt_ids = prompt.ids
                request = answerer(episode, asking)
                assert isinstance(request, Request)
                request.max_tokens = min(request.max_tokens, ask.max_tokens or request.max_tokens)
                stop = (*request.params.stop, *ask.stop)
                request.params = replace(request.params, stop=stop)
                sampled.append((ask, prompt, request))
        completions = (yield [request for _, _, request in sampled]) if sampled else []
        for (ask, prompt, _), completion in zip(sampled, completions, strict=True):
            if completion.finish_reason == "error":
                raise EnvFailure(completion.text)
            known.answer(ask, prompt, completion, rollout)
        [steps] = yield [EnvCall(episode.env, episode.env.step, ({PLAYER: ""},))]
    if broken := program.error:
        text = error_text(broken).removeprefix("ProgramError: ")
        line = (f"an agent ended with {text}; such episodes earn the lowest reward. "
                "If the policy is not the cause, correct it, or raise environments.base.EnvFailure"
                )  # fmt: skip
        say_once(line, text.partition(":")[0])
    if len(program.turns) > len(rollout.turns):
        raise ValueError(f"{len(program.turns)} rewards in `turns`, and {len(rollout.turns)} turns")
    for turn, reward in zip(rollout.turns, program.turns, strict=False):
        turn.reward = reward
    agent.prompt_ids = []
    agent.read(steps[PLAYER])


@dataclass(eq=False)
class Prompt:
    """What a request is answered after."""

    ids: list[int]
    chat: list[Message]  # as the template renders it, for a server
    new: list[Message]  # what the log has not seen
    key: Key
    choices: list[Choice] = field(default_factory=list)  # of the answer, so far


class Conversations:
    """The conversations of one episode."""

    def __init__(self, renderer: Renderer):
        self.renderer, self.policy = renderer, renderer.policy
        # the ids up to the end of an answer, by what it reads like, and then exactly
        self.known: dict[Key, dict[Key, list[int]]] = defaultdict(dict)
        self.asked = Counter[int]()  # prompts, by checksum

    def prompt(self, ask: Ask) -> Prompt:
        """The token ids up to the answer.

        Raises UsageError if the template refuses them, and Refused for more than fits into the
        context.
        """
        tokenizer, messages, limit = self.policy.tokenizer, ask.messages, self.policy.max_length
        key = (json.dumps([ask.tools, ask.schema], sort_keys=True), *map(reads_like, messages))
        chat = [*map(as_openai_writes_it, messages)]
        whole = chat
        if ask.schema:
            schema = SCHEMA.format(json.dumps(ask.schema, ensure_ascii=False))
            whole = with_system(tokenizer, whole, schema, last=True)
        if self.renderer.system_prompt:
            whole = with_system(tokenizer, whole, self.renderer.system_prompt)
        end = len(messages) - 1  # at least one message is new
        while end and key[: end + 1] not in self.known:
            end -= 1
        if not end:
            ids = self.renderer.opening_ids(whole, ask.tools)
        else:
            alike = self.known[key[: end + 1]]
            ids = alike.get(exactly(messages[end - 1])) or [*alike.values()][-1]
            stop_ids = self.policy.stop_ids
            ids = next_prompt_ids(tokenizer, ids, chat[end:], stop_ids, ask.tools)
        if len(ids) >= limit:
            reason = f"{len(ids)} tokens do not fit into {limit}"
            raise Refused(400, f"{reason} (--max-model-len)", "context_length_exceeded")
        return Prompt(ids, without_tools(tokenizer, whole, ask.tools), chat[end:], key)

    def stream(self, agent: int, ids: list[int]) -> int:
        """The random stream of a request: by its prompt, and how often that was asked.

        So it does not depend on the order in which parallel requests arrive.
        """
        checksum = zlib.crc32(json.dumps(ids).encode())
        self.asked[checksum] += 1
        return derive_seed(agent, checksum, self.asked[checksum])

    def answer(self, ask: Ask, prompt: Prompt, completion: Completion, rollout: Rollout) -> None:
        """Adds a completion to the answer, and sends that once it has as many as were asked for."""
        prompt.choices.append(self.add(ask, prompt, completion, rollout))
        if len(prompt.choices) == ask.n:
            ask.reply(prompt.choices, len(prompt.ids))

    def add(self, ask: Ask, prompt: Prompt, completion: Completion, rollout: Rollout) -> Choice:
        """Makes a turn of a completion, and the answer to the request."""
        choice = self.choice(ask, completion, f"{ask.id[:8]}{len(rollout.turns)}")
        answer = {"role": "assistant", "content": choice.content, "calls": choice.calls,
                  "thought": choice.thought}  # fmt: skip
        alike, ids = self.known[*prompt.key, reads_like(answer)], prompt.ids + completion.token_ids
        alike.pop(exactly(answer), None)  # so that the latest is the last
        alike[exactly(answer)] = ids
        told = rollout.for_log.get("tools", [])
        rollout.for_log["tools"] = [*dict.fromkeys([*told, *map(name_of, ask.tools)])]
        rollout.turns.append(
            Turn(prompt.ids, completion.token_ids, completion.logprobs, completion.finish_reason,
                 kept_ids=completion.kept_ids)
        )  # fmt: skip
        rollout.messages += [*prompt.new, {"role": "assistant", "content": completion.text}]
        prompt.new = []
        return choice

    def choice(self, ask: Ask, completion: Completion, number: str) -> Choice:
        """A completion as the client reads it: its thought, its text and its calls."""
        tokenizer, text = self.policy.tokenizer, completion.text
        for stop in ask.stop:
            text = text.partition(stop)[0]
        found = read_calls(tokenizer, text) if ask.tools else []
        calls = [(f"call_{number}_{i}", call.name, json.dumps(call.arguments, ensure_ascii=False))
                 for i, call in enumerate(found) if call.name]  # fmt: skip
        content = spoken(text)
        thought = text[: len(text) - len(content)] if END_OF_THOUGHT in text else ""
        if calls:  # the text before them
            content = content.partition(OPENING)[0].strip()
        reason = "tool_calls" if calls else completion.finish_reason
        texts = [""] * len(completion.token_ids)
        if ask.body.get("logprobs"):
            texts = [str(tokenizer.decode([i])) for i in completion.token_ids]
        tokens = list(zip(texts, completion.logprobs, strict=True))
        return Choice(content, reason, tokens, calls, thought.strip())


def as_openai_writes_it(message: dict[str, Any]) -> Message:
    """A message of a request, with its calls in OpenAI's form."""
    functions = [{"name": n, "arguments": as_dict(text)} for _, n, text in message["calls"]]
    calls: list[dict[str, Any]] = [{"function": function} for function in functions]
    role, content = message["role"], message["content"]
    return clean_message({"role": role, "content": content, "tool_calls": calls})


def reads_like(message: dict[str, Any]) -> str:
    """What stays of a message when a client sends it back; else it was edited."""
    calls = [(name, as_dict(arguments)) for _, name, arguments in message["calls"]]
    return json.dumps([message["role"], message["content"].strip(), calls], sort_keys=True)


def exactly(answer: dict[str, Any]) -> Key:
    """What tells answers that read alike apart: the ids of calls, or the text and the thought."""
    ids = tuple(call_id for call_id, _, _ in answer["calls"])
    return ids or (answer["content"], answer["thought"])


def as_dict(arguments: str) -> dict[str, Any]:
    """The arguments of a call; text that is no JSON object is one argument."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
