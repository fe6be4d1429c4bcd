"""An OpenAI-compatible endpoint for a trained policy, on this machine only.

    python -m core.serve runs/mine                          # http://127.0.0.1:8000/v1
    python -m core.serve Qwen/Qwen3-0.6B --port 8001

Any client of OpenAI's API gets its answers from there, with any API key, such as the agent that the
policy was trained in. environments/adapters/endpoint.py has what it understands. Answers are greedy
unless the request, or the command, sets a temperature; a `seed` repeats them. As in training, a
conversation that goes on keeps the token ids of its answers.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor

from core.config import Config
from core.extras import chat
from core.extras.programs import Conversations, Prompt, differences, matcher
from core.faults import UsageError
from core.sampler import Request, SamplingParams, TorchSampler, draw
from core.terminal import cli
from core.types import Rollout
from environments.adapters.endpoint import Ask, Endpoint, Refused

POLL = 0.1  # seconds
MAX_TURNS = 10_000  # whose ids are kept; then all are forgotten, and rendered again
MIN_TEMPERATURE = 0.01  # below it: greedy


@dataclass(frozen=True)
class Flags(chat.PolicyFlags):
    """Answer requests in OpenAI's API with a trained policy.

    A request may set its own temperature, top_p, seed and token limit.
    """

    port: chat.Port = 8000  # Port on 127.0.0.1; 0: a free one.


def parse(args: list[str]) -> tuple[Flags, chat.Flags, Config]:
    """The flags, as those of core.chat, too; raises UsageError, as `chat.parse` does."""
    kind = tyro.conf.FlagCreatePairsOff[Flags]
    flags: Flags = tyro.cli(kind, prog="python -m core.serve", args=args)
    return flags, *chat.settings(chat.Flags(**vars(flags)))


def main(flags: Flags, chat_flags: chat.Flags, cfg: Config) -> int:
    """Serves until Ctrl-C. Returns the exit code."""
    [speaker] = chat.load_speakers(chat_flags, cfg)
    try:
        endpoint = Endpoint(flags.port, any_key=True)
    except OSError as error:
        raise UsageError(f"--port {flags.port}: {error.strerror}; take another one") from None
    print(f"OPENAI_BASE_URL={endpoint.url}   (Ctrl-C ends)", flush=True)
    with suppress(KeyboardInterrupt), speaker.policy.adapters():
        answer_all(endpoint, speaker, cfg)
    endpoint.close()
    return 0


def answer_all(endpoint: Endpoint, speaker: chat.Speaker, cfg: Config) -> None:
    """Answers requests for ever, all together, each token with the settings of its request."""
    policy, renderer = speaker.policy, speaker.collector.renderer
    say_once = speaker.collector.pool.say_once
    running = dict[Request, tuple[Ask, Prompt, SamplingParams]]()

    def draw_each(logits: Tensor, _: SamplingParams, uniform: Tensor) -> tuple[Tensor, Tensor]:
        wanted = [running[partial.request][2] for partial in sampler.batch]
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
                seed = ask.body.get("seed")
                for wanted in differences(ask, params):
                    if not wanted.startswith(("seed", "temperature", "top_p")):  # it follows these
                        say_once(f"a request sets {wanted}: it is answered as the run samples")
                for stream in range(ask.n):
                    if seed is None:
                        stream = known.stream(cfg.seed, prompt.ids)
                    request = Request(
                        prompt.ids, of_all, cfg.seed if seed is None else seed % 2**63, stream,
                        max_tokens=ask.max_tokens or cfg.max_tokens,
                        matcher=matcher(ask, prompt, policy, sampler, say_once),
                    )  # fmt: skip
                    sampler.add(request)
                    running[request] = ask, prompt, params
            except (UsageError, TypeError, RecursionError, Refused) as error:
                ask.refuse(400, str(error), getattr(error, "code", "invalid_request"))
        for request, completion in sampler.step() if running else []:
            ask, prompt, _ = running.pop(request)
            known.answer(ask, prompt, completion, Rollout("", "", 0, 0))


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


def execute(args: list[str]) -> int:
    return cli.execute(lambda parsed: main(*parsed), args, parse, "core.serve")


if __name__ == "__main__":
    sys.exit(execute(sys.argv[1:]))
