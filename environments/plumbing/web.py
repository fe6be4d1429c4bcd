"""An episode in which people, policies and the players of an environment take turns; its web page.

    python -m environments play tic_tac_toe --web                # type or click

The page, served on this machine only, shows each message as a board (rows of cells), a list of
choices or text. At every turn you answer, or a player does: the demonstrator, the random player, a
policy. All text of environments and policies reaches the page as text, never as markup. A request
from another site is refused.

    GET /           the page
    GET /state      the episode as JSON (`Episode.state`)
    POST /new       {"seed": 7}                            starts an episode
    POST /act       {"agent": .., "text": ".."} or {"agent": .., "player": "demonstrator"}
    POST /talk      {"text": ".."}                         asks the policies; "": begins again
"""

import asyncio
import json
import queue
import random
import secrets
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from environments.base import Env, Message, MultiAgentEnv, UsageError
from environments.parsing import prefill_of, user
from environments.plumbing.http_server import HOST, Server, TooLarge, read_body
from environments.plumbing.text import printable_json
from environments.plumbing.tools import ReadCalls, lines_about, read_calls, with_tools

Player = Callable[[list[Message]], str]  # the conversation of an agent -> its response
PAGE = Path(__file__).with_name("web.html")
MAX_BODY = 1_000_000  # bytes of a request
IDLE = 10  # seconds for a request to arrive
POLL = 0.1  # seconds after which Ctrl-C is noticed where a thread that waits cannot be interrupted
YOU, DEMONSTRATOR, RANDOM = "you", "demonstrator", "random player"
SPEAKERS = ("system", "environment", "tool", "tools")  # of the log, besides who responds


class Episode:
    """One episode of `env`. `players` are the policies that may take a turn, by name.

    `read_calls`: finds the calls of tools in a response. `talkers`: the policies to talk to, apart
    from the episode; `note`: what to know of them.
    """

    def __init__(
        self, env: Env | MultiAgentEnv, name: str, seed: int,
        players: dict[str, Player] | None = None, read_calls: ReadCalls = read_calls,
        talkers: dict[str, Player] | None = None, note: str = "",
    ):  # fmt: skip
        self.env = with_tools(env, read_calls)
        self.name, self.players, self.talkers = name, players or {}, talkers or {}
        self.note = note
        self.talk("")
        self.start(seed)

    def start(self, seed: int) -> None:
        """Starts the episode of `seed`."""
        self.seed, self.rng = seed, random.Random(seed)
        self.chats: dict[str, list[Message]] = {}  # what each agent sees
        self.log: list[dict[str, Any]] = []  # what the page shows, in order
        self.responses: dict[str, str] = {}  # of the agents that have answered in this turn
        self.returns: dict[str, float] = {}
        openings = self.env.reset(seed)
        for line in lines_about(self.env):
            self.log.append({"agent": "", "speaker": "tools", "text": line})
        for agent, messages in openings.items():
            for message in messages:
                self._receive(agent, message)
        self.asked = [agent for agent, messages in openings.items() if messages]

    def act(self, agent: str, text: str | None = None, player: str = YOU) -> None:
        """Records the response of an agent, typed or of a player; steps once all have answered.

        Raises UsageError if the agent is not asked, or the player has no response.
        """
        if agent not in self.asked or agent in self.responses:
            raise UsageError(f"{agent} is not asked to act")
        if text is None and (text := self._response_of(player, agent)) is None:
            raise UsageError(f"this environment has no {player}")
        chat, given = self.chats[agent], prefill_of(self.chats[agent])
        if given:
            del chat[-1]
        self.responses[agent] = given + text
        chat.append({"role": "assistant", "content": given + text})
        self.log.append({"agent": agent, "speaker": player, "text": text})
        if set(self.responses) == set(self.asked):
            responses, self.responses = self.responses, {}
            self._step(responses)

    def talk(self, text: str) -> None:
        """Asks every talker, each in its own conversation; "" begins these again."""
        if not text:
            self.talks: dict[str, list[Message]] = {name: [] for name in self.talkers}
            self.talk_log: list[dict[str, str]] = []
            return
        asked = {name: [*chat, user(text)] for name, chat in self.talks.items()}
        answers = {name: self.talkers[name](chat) for name, chat in asked.items()}
        self.talks = {
            name: [*chat, {"role": "assistant", "content": answers[name]}]
            for name, chat in asked.items()
        }
        said = {YOU: text} | answers
        self.talk_log += [{"speaker": name, "text": line} for name, line in said.items()]

    @property
    def waiting(self) -> list[str]:
        """The agents that have not answered in this turn; none at the end."""
        return [agent for agent in self.asked if agent not in self.responses]

    def players_for(self, agent: str) -> list[str]:
        """Who can take the turn of an agent that is asked to act, besides you."""
        own = {name: self._response_of(name, agent) for name in (DEMONSTRATOR, RANDOM)}
        return [*self.players, *(name for name, text in own.items() if text is not None)]

    def state(self) -> dict[str, Any]:
        """What the page shows."""
        return {
            "env": self.name, "seed": self.seed, "log": self.log, "returns": self.returns,
            "waiting": [{"agent": a, "players": self.players_for(a)} for a in self.waiting],
            "talkers": list(self.talkers), "talk": self.talk_log, "note": self.note,
        }  # fmt: skip

    def _step(self, responses: dict[str, str]) -> None:
        steps = self.env.step(responses)
        for agent, step in steps.items():
            self.returns[agent] = self.returns.get(agent, 0.0) + float(step.reward)
            if agent in responses or step.reward or step.done:
                info = {key: str(value) for key, value in step.info.items()}
                row = {"agent": agent, "reward": float(step.reward), "done": step.done}
                self.log.append(row | {"info": info})
            if step.fresh:
                self.chats[agent] = []
            for message in step.messages:
                self._receive(agent, message)
        self.asked = [agent for agent, step in steps.items() if step.message and not step.done]

    def _receive(self, agent: str, message: Message) -> None:
        self.chats.setdefault(agent, []).append(message)
        speaker = "environment" if message["role"] == "user" else message["role"]
        self.log.append({"agent": agent, "speaker": speaker, "text": message["content"] or ""})

    def _response_of(self, player: str, agent: str) -> str | None:
        """The response of a player; None if there is none."""
        if player in self.players:
            return self.players[player](list(self.chats[agent]))
        if player == DEMONSTRATOR:
            return self.env.demonstrate(agent)
        return self.env.guess(agent, self.rng)


class Page:
    """The page of an episode, served on loopback; `port` 0: a free one. Raises UsageError.

    What requests do to the episode waits in a queue for the thread that calls `work`: environments
    and policies run in that thread, one call after the other.
    """

    def __init__(self, episode: Episode, port: int = 0):
        self.episode = episode
        self.calls = queue.SimpleQueue[tuple[Callable[[], None], Future[Response]]]()
        try:
            self.server = Server(self.respond, HOST, port, IDLE)
        except (OSError, OverflowError) as error:
            raise UsageError(f"--port {port}: {error}") from None
        self.port = self.server.address[1]

    def work(self) -> None:
        """Makes the next call, if one comes within a moment."""
        with suppress(queue.Empty):
            call, answer = self.calls.get(timeout=POLL)
            response = self._answer(call)
            with suppress(InvalidStateError):  # the browser has left
                answer.set_result(response)

    async def respond(self, request: Request) -> Response:
        """Answers a request, its call once that was made."""
        path = request.scope["path"]
        if request.method == "POST":
            return await self._post(path, request)
        if request.method != "GET":
            return _json(405, {"error": "refused"})
        if not self._is_ours(request):
            return _json(403, {"error": "open the page at the address that was printed"})
        if path == "/":
            nonce = secrets.token_urlsafe(16)
            page = PAGE.read_text(encoding="utf-8").replace("NONCE", nonce)
            return _send(200, "text/html; charset=utf-8", page, f"'nonce-{nonce}'")
        if path == "/state":
            return await self._called(lambda: None)
        return _json(404, {"error": "there is only one page: /"})

    async def _post(self, path: str, request: Request) -> Response:
        # JSON from another site needs a preflight request, which gets no answer here
        is_json = request.headers.get("content-type") == "application/json"
        if not self._is_ours(request) or not is_json:
            return _json(403, {"error": "refused"})
        try:
            body = json.loads(await read_body(request, MAX_BODY))
            if path == "/new":
                call = partial(self.episode.start, int(body["seed"]))
            elif path == "/talk":
                call = partial(self.episode.talk, str(body["text"]))
            else:
                text, player = body.get("text"), str(body.get("player", YOU))
                call = partial(self.episode.act, str(body["agent"]),
                               None if text is None else str(text), player)  # fmt: skip
        except TooLarge as error:
            return _json(413, {"error": str(error)})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError,
                RecursionError) as error:  # fmt: skip
            return _json(400, {"error": f"bad request: {error}"})
        return await self._called(call)

    async def _called(self, call: Callable[[], None]) -> Response:
        answer = Future[Response]()
        self.calls.put((call, answer))
        return await asyncio.wrap_future(answer)

    def _answer(self, call: Callable[[], None]) -> Response:
        """The state after `call`; its exception as an error."""
        try:
            call()
            return _json(200, self.episode.state())
        except (Exception, SystemExit) as error:  # of the environment or the policy
            kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
            return _json(400, {"error": f"{kind}{error}"})

    def _is_ours(self, request: Request) -> bool:
        """Whether the browser asks for this page itself, not for a name that leads here."""
        hosts = (f"{HOST}:{self.port}", f"localhost:{self.port}")
        origin = request.headers.get("origin")
        return request.headers.get("host") in hosts and (
            origin is None or origin.removeprefix("http://") in hosts
        )


def serve(episode: Episode, port: int = 0) -> None:
    """Serves the page until Ctrl-C. The environment and the policies run in this thread."""
    page = Page(episode, port)
    print(f"play at http://{HOST}:{page.port}   (Ctrl-C ends)", flush=True)
    try:
        while True:
            page.work()
    finally:
        page.server.close()


def _json(status: int, data: dict[str, Any]) -> Response:
    return _send(status, "application/json", printable_json(json.dumps(data)))


def _send(status: int, kind: str, body: str, inline: str = "'none'") -> Response:
    policy = f"default-src 'none'; connect-src 'self'; script-src {inline}; style-src {inline}"
    return Response(body, status, {
        "Content-Type": kind, "Cache-Control": "no-store",
        "Content-Security-Policy": f"{policy}; img-src data:; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
    })  # fmt: skip
