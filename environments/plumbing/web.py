"""An episode in which people, policies and the players of an environment take turns; its web page.

    python -m environments play tic_tac_toe --web                # type or click
    python -m core.chat runs/mine --web            # beside a trained policy, or talk to it

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

import json
import random
import re
import secrets
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from environments.base import Env, Message, MultiAgentEnv, UsageError
from environments.parsing import prefill_of, user
from environments.plumbing.text import printable_json
from environments.plumbing.tools import ReadCalls, lines_about, read_calls, with_tools

Player = Callable[[list[Message]], str]  # the conversation of an agent -> its response
HOST = "127.0.0.1"
PAGE = Path(__file__).with_name("web.html")
MAX_BODY = 1_000_000  # bytes of a request
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
        self.log.append({"agent": agent, "speaker": speaker, "text": message["content"]})

    def _response_of(self, player: str, agent: str) -> str | None:
        """The response of a player; None if there is none."""
        if player in self.players:
            return self.players[player](list(self.chats[agent]))
        if player == DEMONSTRATOR:
            return self.env.demonstrate(agent)
        return self.env.guess(agent, self.rng)


def make_server(episode: Episode, port: int = 0) -> ThreadingHTTPServer:
    """Returns a server of the page on loopback; `port` 0: a free one. `serve_forever` runs it."""
    try:
        return _Server((HOST, port), partial(_Handler, episode, threading.Lock()))
    except (OSError, OverflowError) as error:
        raise UsageError(f"--port {port}: {error}") from None


def serve(episode: Episode, port: int = 0) -> None:
    """Serves the page until Ctrl-C."""
    with make_server(episode, port) as server:
        print(f"play at http://{HOST}:{server.server_port}   (Ctrl-C ends)", flush=True)
        server.serve_forever()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints the traceback of a mistake; a browser that closes its connection is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds for a request to arrive

    def __init__(self, episode: Episode, lock: threading.Lock, *args: Any):
        self.episode, self.lock = episode, lock
        super().__init__(*args)

    def do_GET(self) -> None:
        if not self._is_ours():
            self._send(403, {"error": "open the page at the address that was printed"})
        elif self.path == "/":
            nonce = secrets.token_urlsafe(16)
            page = PAGE.read_text(encoding="utf-8").replace("NONCE", nonce).encode()
            self._send_bytes(200, "text/html; charset=utf-8", page, f"'nonce-{nonce}'")
        elif self.path == "/state":
            with self.lock:
                self._answer(lambda: None)
        else:
            self._send(404, {"error": "there is only one page: /"})

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length") or "0"
        length = int(size) if re.fullmatch("[0-9]{1,9}", size) else -1
        # JSON from another site needs a preflight request, which gets no answer here
        is_json = self.headers.get("Content-Type") == "application/json"
        if not self._is_ours() or not is_json or not 0 <= length <= MAX_BODY:
            self._send(403, {"error": "refused"})
            return
        try:
            request = json.loads(self.rfile.read(length))
            if self.path == "/new":
                call = partial(self.episode.start, int(request["seed"]))
            elif self.path == "/talk":
                call = partial(self.episode.talk, str(request["text"]))
            else:
                text, player = request.get("text"), str(request.get("player", YOU))
                call = partial(self.episode.act, str(request["agent"]),
                               None if text is None else str(text), player)  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError,
                RecursionError) as error:  # fmt: skip
            self._send(400, {"error": f"bad request: {error}"})
            return
        with self.lock:
            self._answer(call)

    def _answer(self, call: Callable[[], None]) -> None:
        """Sends the state after `call`; its exception as an error."""
        try:
            call()
            self._send(200, self.episode.state())
        except Exception as error:  # of the environment or the policy: the page shows it
            kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
            self._send(400, {"error": f"{kind}{error}"})

    def _is_ours(self) -> bool:
        """Whether the browser asks for this page itself, not for a name that leads here."""
        assert isinstance(self.server, ThreadingHTTPServer)
        port = self.server.server_port
        hosts = (f"{HOST}:{port}", f"localhost:{port}")
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in hosts and (
            origin is None or origin.removeprefix("http://") in hosts
        )

    def _send(self, status: int, data: dict[str, Any]) -> None:
        self._send_bytes(status, "application/json", printable_json(json.dumps(data)).encode())

    def _send_bytes(self, status: int, kind: str, body: bytes, inline: str = "'none'") -> None:
        self.send_response(status)
        policy = f"default-src 'none'; connect-src 'self'; script-src {inline}; style-src {inline}"
        for name, value in {
            "Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store",
            "Content-Security-Policy": f"{policy}; img-src data:; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
