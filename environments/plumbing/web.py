"""An episode that a person plays, and its page in the browser.

    python -m environments play tic_tac_toe --web       # type or click

The page is served on this machine only. All text of environments reaches it as text, never as
markup. A request from another site is refused.

    GET /           the page
    GET /state      the episode as JSON (`Episode.state`)
    POST /move      {"agent": .., "text": ".."}, or {"seed": 7}: starts an episode
"""

import asyncio
import json
import queue
import random
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from environments.base import Env, Message, MultiAgentEnv, UsageError
from environments.parsing import prefill_of
from environments.plumbing.http_server import HOST, Server
from environments.plumbing.text import printable_json
from environments.plumbing.tools import lines_about, with_tools

FILE = Path(__file__).with_name("web.html")
POLL = 0.1  # seconds after which Ctrl-C is noticed, at the latest
YOU, DEMONSTRATOR, RANDOM = "you", "demonstrator", "random player"


class Episode:
    """One episode of `env`: what has been said, and who is asked to act."""

    def __init__(self, env: Env | MultiAgentEnv, name: str, seed: int):
        self.env, self.name = with_tools(env), name
        self.start(seed)

    def start(self, seed: int) -> None:
        """Starts the episode of `seed`."""
        self.seed, self.rng = seed, random.Random(seed)
        self.log: list[dict[str, Any]] = []  # what is shown, in order
        self.responses: dict[str, str] = {}  # of the agents that have answered in this turn
        self.returns: dict[str, float] = {}
        openings = self.env.reset(seed)
        for line in lines_about(self.env):
            self.log.append({"agent": "", "speaker": "tools", "text": line})
        for agent, messages in openings.items():
            self._receive(agent, messages)
        # the agents that are to act in this turn, and how the response of each begins
        self.asked = {agent: prefill_of(said) for agent, said in openings.items() if said}

    @property
    def waiting(self) -> list[str]:
        """The agents that have not answered in this turn; none at the end."""
        return [agent for agent in self.asked if agent not in self.responses]

    def act(self, agent: str, text: str, player: str = YOU) -> None:
        """Records the response of an agent; steps once all have answered."""
        if agent not in self.waiting:
            raise UsageError(f"{agent} is not asked to act")
        self.responses[agent] = self.asked[agent] + text
        self.log.append({"agent": agent, "speaker": player, "text": text})
        if self.waiting:
            return
        responses, self.responses = self.responses, {}
        steps = self.env.step(responses)
        for agent, step in steps.items():
            self.returns[agent] = self.returns.get(agent, 0.0) + float(step.reward)
            if agent in responses or step.reward or step.done:
                info = {key: str(value) for key, value in step.info.items()}
                row = {"agent": agent, "reward": float(step.reward), "done": step.done}
                self.log.append(row | {"info": info})
            self._receive(agent, step.messages)
        acting = {agent: step for agent, step in steps.items() if step.message and not step.done}
        self.asked = {agent: prefill_of(step.messages) for agent, step in acting.items()}

    def demonstrate(self, agent: str) -> None:
        """Lets the demonstrator act, or else the random player."""
        if (text := self.env.demonstrate(agent)) is not None:
            self.act(agent, text, DEMONSTRATOR)
        elif (text := self.env.guess(agent, self.rng)) is not None:
            self.act(agent, text, RANDOM)
        else:
            raise UsageError("this environment has no demonstrator and no random player: use play")

    def state(self) -> dict[str, Any]:
        """What the page shows."""
        names = ("name", "seed", "log", "returns", "waiting")
        return {name: getattr(self, name) for name in names}

    def _receive(self, agent: str, messages: list[Message]) -> None:
        for message in messages:
            speaker = "environment" if message["role"] == "user" else message["role"]
            text = message["content"] or ""
            self.log.append({"agent": agent, "speaker": speaker, "text": text})


class Page(Server):
    """The page of an episode. Moves wait for the thread that calls `work`, as an environment may
    need the main thread, and a thread without a running event loop."""

    def __init__(self, episode: Episode, port: int = 0):
        self.episode = episode
        self.moves = queue.SimpleQueue[tuple[bytes, Future[Response]]]()
        super().__init__(self.respond, port=port)

    async def respond(self, request: Request) -> Response:
        path, port = request.scope["path"], self.address[1]
        if request.headers.get("host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            return Response("open the address that was printed", 403)
        if path == "/":
            return Response(FILE.read_bytes(), media_type="text/html")
        if path == "/move" and request.headers.get("content-type") != "application/json":
            return Response("send JSON", 403)  # what the page of another site cannot do
        answer = Future[Response]()
        self.moves.put((await request.body() if path == "/move" else b"{}", answer))
        return await asyncio.wrap_future(answer)

    def work(self) -> None:
        """Makes the next move, if one comes within a moment, and answers with the state."""
        with suppress(queue.Empty):
            body, answer = self.moves.get(timeout=POLL)
            try:
                move, status = json.loads(body), 200
                if "seed" in move:
                    self.episode.start(int(move["seed"]))
                elif move:
                    self.episode.act(move["agent"], str(move["text"]))
                found = self.episode.state()
            except (Exception, SystemExit) as error:  # of the request or the environment
                kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
                status, found = 400, {"error": f"{kind}{error}"}
            text = printable_json(json.dumps(found))
            with suppress(InvalidStateError):  # the browser has left
                answer.set_result(Response(text, status, media_type="application/json"))


def serve(episode: Episode, port: int = 0) -> None:
    """Serves the page until Ctrl-C; `port` 0: a free one."""
    try:
        page = Page(episode, port)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--port {port}: {error}") from None
    print(f"play at http://{HOST}:{page.address[1]}   (Ctrl-C ends)", flush=True)
    while True:
        page.work()
