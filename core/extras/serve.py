"""An OpenAI-compatible endpoint for a trained policy, on this machine only.

    python -m core.serve runs/mine                          # http://127.0.0.1:8000/v1
    python -m core.serve Qwen/Qwen3-0.6B --port 8001
    python -m core.serve runs/mine --web                    # and a page to talk to it

Any client of OpenAI's API gets its answers from there, with any API key, such as the agent that the
policy was trained in. environments/adapters/endpoint.py has what it understands. Answers are greedy
unless the request, or the command, sets a temperature; a `seed` repeats them. As in training, a
conversation that goes on keeps the token ids of its answers.
"""

import json
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import httpx
import torch
import tyro
from torch import Tensor

from core.config import Config
from core.extras import chat
from core.extras.agents import Conversations, Prompt, cut_at, differences, matcher, say_once
from core.faults import UsageError
from core.run import cli
from core.sampler import Request, SamplingParams, TorchSampler, draw
from core.types import Message, Rollout
from environments.adapters.endpoint import Ask, Choice, Endpoint, Refused
from environments.plumbing import web
from environments.plumbing.registry import make

POLL = 0.1  # seconds
MAX_TURNS = 10_000  # whose ids are kept; then all are forgotten, and rendered again
MIN_TEMPERATURE = 0.01  # below it: greedy


@dataclass(frozen=True)
class Flags:
    """Answer requests in OpenAI's API with a trained policy."""

    # Run, such as runs/mine or mine, Hub id, folder of a model, tiny or smollm2.
    policy: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="POLICY")]
    port: int = 8000  # Port on 127.0.0.1; 0: a free one.
    web: bool = False  # Also serve a page on which you talk to the policy.
    temperature: float = 0.0  # Of requests that set none; 0: greedy.
    top_p: float = 1.0  # Of requests that set none; 1: keep all tokens.
    top_k: int = 0  # Keep this many of the most likely tokens; 0: keep all.
    # Token limit of requests that set none; 0: that of the run; without a run 64 for tiny and
    # smollm2, otherwise 1024.
    max_tokens: int = 0
    seed: int = 0  # Random seed of the answers.
    device: str = "auto"  # cpu, cuda, cuda:N or mps; auto: CUDA, then MPS, then the CPU.
    # Precision of the weights; auto: that of the run; otherwise bfloat16 on CUDA, else float32.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust: bool = False  # Run the code that the run names, or that comes with the model.


@dataclass(eq=False)
class Waiting:
    """One completion that a request wants."""

    ask: Ask
    prompt: Prompt
    params: SamplingParams


def parse(args: list[str]) -> tuple[Flags, chat.Flags, Config]:
    """The flags, as those of core.chat, too; raises UsageError, as `chat.parse` does."""
    kind = tyro.conf.FlagCreatePairsOff[Flags]
    flags: Flags = tyro.cli(kind, prog="python -m core.serve", args=args)
    if not 0 <= flags.port < 65536:
        raise UsageError(f"--port must be 0 to 65535, not {flags.port}")
    shared = {k: v for k, v in vars(flags).items() if k not in ("port", "web")}
    return flags, *chat.settings(chat.Flags(**shared))


def main(flags: Flags, chat_flags: chat.Flags, cfg: Config) -> int:
    """Serves until Ctrl-C. Returns the exit code."""
    [speaker] = chat.load_speakers(chat_flags, cfg)
    try:
        endpoint = Endpoint(flags.port, any_key=True)
    except OSError as error:
        raise UsageError(f"--port {flags.port}: {error.strerror}; take another one") from None
    print(f"OPENAI_BASE_URL={endpoint.url}   (Ctrl-C ends)", flush=True)
    if flags.web:
        task = chat.held_out_task(cfg, 0)
        talkers: dict[str, web.Player] = {speaker.label: partial(ask_endpoint, endpoint.url)}
        page = web.Episode(make(task.env), task.env.short, task.seed, talkers, talkers=talkers)
        threading.Thread(target=web.serve, args=(page,), daemon=True).start()
    with suppress(KeyboardInterrupt), speaker.policy.adapters():
        answer_all(endpoint, speaker, cfg)
    endpoint.close()
    return 0


def answer_all(endpoint: Endpoint, speaker: chat.Speaker, cfg: Config) -> None:
    """Answers requests for ever, all together, each token with the settings of its request."""
    policy, renderer = speaker.policy, speaker.collector.renderer
    running, choices = dict[Request, Waiting](), dict[Ask, list[Choice]]()

    def draw_each(logits: Tensor, _: SamplingParams, uniform: Tensor) -> tuple[Tensor, Tensor]:
        wanted = [running[partial.request].params for partial in sampler.batch]
        token_ids, logprobs = torch.zeros(len(wanted), dtype=torch.long), torch.zeros(len(wanted))
        for params in {*wanted}:
            rows = torch.tensor([i for i, other in enumerate(wanted) if other == params])
            drawn = draw(logits[rows], params, uniform[rows])
            token_ids[rows], logprobs[rows] = (x.cpu() for x in drawn)
        return token_ids, logprobs

    sampler, known = TorchSampler(policy, draw_each), Conversations(renderer)
    of_all = SamplingParams(policy.max_length)
    assert endpoint.only
    while True:
        for ask in endpoint.only.receive(0 if running else POLL) or []:
            try:
                if known.num_turns > MAX_TURNS:
                    known = Conversations(renderer)
                    endpoint.only.responses.clear()
                params, prompt = params_of(ask, cfg, policy.max_length), known.prompt(ask)
                choices[ask], seed = [], ask.body.get("seed")
                for wanted in differences(ask, params):
                    if not wanted.startswith(("seed", "temperature", "top_p")):  # it follows these
                        line = f"a request sets {wanted}: it is answered as the run samples"
                        say_once(chat._note, line, wanted)
                for stream in range(ask.n):
                    if seed is None:
                        stream = known.stream(cfg.seed, prompt.ids)
                    request = Request(
                        prompt.ids, of_all, cfg.seed if seed is None else seed % 2**63, stream,
                        max_tokens=ask.max_tokens or cfg.max_tokens,
                        matcher=matcher(ask, prompt, policy, sampler, chat._note),
                    )  # fmt: skip
                    sampler.add(request)
                    running[request] = Waiting(ask, prompt, params)
            except (UsageError, TypeError, RecursionError, Refused) as error:
                is_long = choices.pop(ask, None) is not None  # only `sampler.add` raises after it
                code = "context_length_exceeded" if is_long else "invalid_request"
                ask.refuse(400, str(error), getattr(error, "code", code))
        for request, completion in sampler.step() if running else []:
            ended = running.pop(request)
            completion = cut_at(policy, completion, ended.ask.stop)
            rollout = Rollout("", "", 0, 0)
            choices[ended.ask].append(known.add(ended.ask, ended.prompt, completion, rollout))
            if len(choices[ended.ask]) == ended.ask.n:
                ended.ask.reply(choices.pop(ended.ask), len(ended.prompt.ids))


def params_of(ask: Ask, cfg: Config, max_tokens: int) -> SamplingParams:
    """How to sample the answer to a request. Raises TypeError for a value that is no number."""

    def number(name: str, default: float, most: float) -> float:
        value = ask.body.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or not 0 <= value <= most:
            raise TypeError(f"{name} must be a number from 0 to {most:g}")
        return float(value)

    temperature, top_p = number("temperature", cfg.temperature, 100), number("top_p", cfg.top_p, 1)
    temperature = temperature if temperature >= MIN_TEMPERATURE else 0.0
    return SamplingParams(max_tokens, temperature, max(top_p, 1e-6), cfg.top_k, cfg.seed)


def ask_endpoint(url: str, messages: list[Message]) -> str:
    """The endpoint's answer to a conversation, for the page."""
    body: dict[str, Any] = {"messages": messages}
    answer = httpx.post(f"{url}/chat/completions", content=json.dumps(body), timeout=None,
                        trust_env=False)  # fmt: skip
    if answer.status_code != 200:
        raise UsageError(answer.json()["error"]["message"])
    return answer.json()["choices"][0]["message"]["content"] or ""


def run(args: list[str]) -> int:
    return cli.run(lambda parsed: main(*parsed), args, parse, "core.serve")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
