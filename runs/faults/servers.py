"""Hostile servers, and hostile requests to our own.

    python runs/faults/reproduce.py --only servers --tries 50

    openai     --sampler openai against a server that answers with nonsense, slowly, for ever, with
               a redirect, a bomb of gzip or the API key; by calls, and as whole runs of train.py
    openenv    an OpenEnv client against a server whose messages have other values
    remote     a whole run with a remote server of such answers as in settings.py
    requests   hostile requests to `environments.adapters.remote`, and to the page of `--web`

A try fails if it does not end in time, ends in a traceback or with several lines, shows or saves
the API key, sends it to another address, takes over 500 MB, or leaves a process or an open file.
"""

import contextlib
import gzip
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import socket
import socketserver
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from settings import JSON, SERVER, answers  # noqa: E402

from core.model import load_policy  # noqa: E402
from core.openai_sampler import OpenAISampler  # noqa: E402
from core.sampler import SamplingParams  # noqa: E402
from core.types import CONTROL_CHARACTERS, UsageError  # noqa: E402
from environments.adapters import remote  # noqa: E402
from environments.base import checked_step  # noqa: E402
from environments.registry import make  # noqa: E402
from environments.web import Episode, make_server  # noqa: E402

Case = tuple[str, Callable[[], str]]  # a name, and what returns "" or says in a line what failed
Pieces = Iterator[bytes | float | None]  # bytes to send, seconds to wait; None: reset
KEY = "secret-7f3a"
GOOD = "<answer>1</answer>"
STREAM = "Content-Type: text/event-stream"
VALUES = [
    *JSON, "-1", "0", "1e308", "-Infinity", "[[]]", '[{"a": 1}]', '{"a": [1]}', f'"{KEY}"',
    '"\\u001b]0;x\\u0007"', '"\\u0000"', '"a\\nb\\r\\u2028c"', '"\\u202e"', '"[/x]"',
]  # fmt: skip
TOKEN = {"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}
CHUNK: dict[str, Any] = {
    "id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "usage": {"total": 1},
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": GOOD},
                 "finish_reason": "stop", "logprobs": {"content": [TOKEN]}}],
}  # fmt: skip
STATE = {"type": "observation",
         "data": {"observation": {"message": "?"}, "reward": 1.0, "done": True}}  # fmt: skip
RETRY = ["0", "-1", "1e9", "nan", "inf", "9" * 5000, "x", "Fri, 31 Dec 9999 23:59:59 GMT"]
RUN = """--sampler openai --num-updates 0 --eval-num-tasks 2 --run-name a --model-id m --device cpu
    --max-tokens 8 --env letter_counting""".split()
PLAY = """--num-updates 1 --sft-steps 0 --eval-num-tasks 2 --run-name a --num-prompts 2
    --group-size 2 --max-tokens 4 --max-model-len 256 --device cpu --model-id tiny-random""".split()
MAX_KILOBYTES = 500_000


def cases(rng: random.Random) -> Iterator[Case]:
    """Tries without end."""
    os.environ |= {"OPENAI_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "openai", "core.report.page", "core.report.curves"])
    context.Process(target=os.getpid).start()  # which waits for the imports
    with (
        tempfile.TemporaryDirectory(prefix="picorl-servers-") as name,
        Server() as server,
        openenv_server() if find_spec("openenv") else nullcontext() as openenv,
    ):
        tiny = Path(name, "tiny")
        policy = load_policy("tiny", device="cpu", tiny_folder=tiny)
        while True:
            for _ in range(5):
                what, pieces = attack(rng, server)
                yield f"openai: {what}"[:200], partial(sampled, policy, server, pieces)
            what, pieces = attack(rng, server)
            run = partial(evaluated, context, Path(name, "run"), server, pieces)
            yield f"train.py with openai: {what}"[:200], run
            what, reset, step = answers(rng)
            folder = Path(name, "run")
            yield f"train.py with remote: {what}"[:200], partial(play, context, folder, reset, step)
            text = changed(rng, STATE)
            if openenv:
                yield f"openenv: {text}"[:200], partial(observed, openenv, text)
            lines = [hostile_line(rng) for _ in range(20)]
            yield f"requests to remote: {lines}"[:200], partial(served, lines)
            yield "requests to the page", partial(asked, [hostile_request(rng) for _ in range(8)])


class Server:
    """Answers every request on a loopback port with `pieces`; `other` must never be asked."""

    def __enter__(self) -> "Server":
        self.pieces: Callable[[], Pieces] = lambda: iter(())
        self.active, self.stop, self.asked_other = 0, threading.Event(), 0
        lock = threading.Lock()

        class Handler(socketserver.BaseRequestHandler):
            def handle(handler) -> None:
                with lock:
                    self.active += 1
                try:
                    with contextlib.suppress(OSError):
                        self.answer(handler.request)
                finally:
                    handler.request.close()
                    with lock:
                        self.active -= 1

        class Other(socketserver.BaseRequestHandler):
            def handle(handler) -> None:
                self.asked_other += 1

        self.servers = [socketserver.ThreadingTCPServer(("127.0.0.1", 0), kind)
                        for kind in (Handler, Other)]  # fmt: skip
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.port, self.other = (server.server_address[1] for server in self.servers)
        self.url = f"http://127.0.0.1:{self.port}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def answer(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        received = b""
        while b"\r\n\r\n" not in received:
            chunk = connection.recv(65536)
            if not chunk:
                return
            received += chunk
        head, _, body = received.partition(b"\r\n\r\n")
        sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        missing = int(sizes[0].split(b":")[1]) - len(body) if sizes else 0
        while missing > 0:
            missing -= len(connection.recv(65536)) or missing
        for piece in self.pieces():
            if piece is None:
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return
            if isinstance(piece, float):
                if self.stop.wait(piece):
                    return
                continue
            connection.sendall(piece)

    def settle(self) -> None:
        """Waits until the last connection is closed."""
        ends = time.monotonic() + 6
        while self.active and time.monotonic() < ends:
            time.sleep(0.01)


def attack(rng: random.Random, server: Server) -> tuple[str, Callable[[], Pieces]]:
    """What a server sends instead of an answer: its name, and the pieces."""
    kind = rng.choice([*ATTACKS])
    what, pieces = ATTACKS[kind](rng, server)
    return f"{kind} {what}", pieces


def status(rng: random.Random, server: Server) -> tuple[str, Callable[[], Pieces]]:
    code = rng.choice([204, 304, 400, 401, 403, 404, 408, 409, 413, 418, 422, 429, 500, 503, 999])
    headers = [f"Retry-After: {rng.choice(RETRY)}", "x-should-retry: true", f"X: {KEY}"]
    body = rng.choice([KEY, f"a\r\nb\x1b[2J{KEY}", "", "x" * 5_000_000,
                       json.dumps({"error": {"message": f"{KEY}\n\x1b", "code": [KEY]}}),
                       rng.choice(VALUES)])  # fmt: skip
    if rng.random() < 0.4:
        body = f'{{"error": {{"message": {rng.choice(VALUES)}, "type": {rng.choice(VALUES)}}}}}'
    kind = f"Content-Type: {rng.choice(['application/json', 'text/html', KEY])}"
    sent = http(f"{code} {KEY}", [*rng.sample(headers, 2), kind], body.encode())
    return f"{code} {sent[:60]!r}", lambda: iter([sent])


def redirect(rng: random.Random, server: Server) -> tuple[str, Callable[[], Pieces]]:
    code, target = rng.choice([300, 301, 302, 303, 307, 308]), f"127.0.0.1:{server.other}"
    place = rng.choice(
        [f"http://{target}/v1", f"//{target}/", f"http://{KEY}@{target}/", "/v1", ""]
    )
    sent = http(f"{code} X", [f"Location: {place}", "Retry-After: 0"], b"")
    return f"{code} {place}", lambda: iter([sent])


def chunk(rng: random.Random, server: Server) -> tuple[str, Callable[[], Pieces]]:
    content = rng.choice(
        [CHUNK, CHUNK, {**CHUNK, "choices": rng.choice([0, 2, 1000]) * CHUNK["choices"]}]
    )
    text = changed(rng, content)
    events = f"data: {text}\n\n" * rng.choice([1, 1, 3]) + "data: [DONE]\n\n"
    kind = rng.choice([STREAM, STREAM, STREAM, "Content-Type: application/json", "X: y"])
    sent = http("200 OK", [kind], (events if kind == STREAM else text).encode())
    return f"{kind} {text}", lambda: iter([sent])


def events(rng: random.Random, server: Server) -> tuple[str, Callable[[], Pieces]]:
    good, value = f"data: {json.dumps(CHUNK)}\n\n", rng.choice(VALUES)
    body = rng.choice([
        good.replace("\n", "\r"), f"data: {value}\n\n", f"event: error\ndata: {value}\n\n",
        "data: [DONE]\n\n", "\n\n\n", "",
        f'data: {{"error": {value}}}\n\n', f"event: {KEY}\ndata: {{}}\n\n",
        "data:\n" * 10_000 + "\n", f"id: {KEY}\nretry: 1e400\n{good}", "\x00\ufeff" + good,
    ])  # fmt: skip
    sent = http("200 OK", [STREAM], body.encode("utf-8", "surrogatepass"))
    return repr(body[:80]), lambda: iter([sent])


def slow(rng: random.Random, server: Server) -> tuple[str, Callable[[], Pieces]]:
    sent = http("200 OK", [STREAM], f"data: {json.dumps(CHUNK)}\n\n".encode())
    begin = rng.choice([0, len(sent) // 2])

    def pieces() -> Pieces:
        yield sent[:begin]
        for byte in sent[begin:]:
            yield bytes([byte])
            yield 0.05

    return f"from byte {begin}", pieces


def cut(rng: random.Random, server: Server) -> tuple[str, Callable[[], Pieces]]:
    body = f"data: {json.dumps(CHUNK)}\n\n".replace('"stop"', "null").encode() * 2
    sent = http("200 OK", [STREAM, f"Content-Length: {len(body) + 9}"], body)
    place, end = rng.randrange(len(sent)), rng.choice([None, b""])
    return f"at {place}, {'reset' if end is None else 'closed'}", lambda: iter([sent[:place], end])


def endless(rng: random.Random, server: Server) -> tuple[str, Callable[[], Pieces]]:
    piece = rng.choice([
        f"data: {json.dumps(CHUNK)}\n\n".replace('"stop"', "null").encode() * 100,
        b": comment\n\n" * 1000, b'data: {"choices": []}\n\n' * 1000, b"x" * 65536, b"\n" * 65536,
        b"data: " + b"x" * 65536, KEY.encode() * 5000,
    ])  # fmt: skip
    head = rng.choice(["200 OK", "200 OK", "500 X", "400 X"])
    kind = rng.choice([STREAM, STREAM, "Content-Type: text/html"])
    chunked = rng.random() < 0.5
    start = http(head, [kind, "Transfer-Encoding: chunked"] if chunked else [kind], b"")
    if chunked:
        piece = f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    if rng.random() < 0.2:
        start, piece = b"HTTP/1.1 200 OK\r\n", b"X: " + b"y" * 65536 + b"\r\n"

    def pieces() -> Pieces:
        yield start
        while not server.stop.is_set():
            yield piece

    return f"{head} {kind} {piece[:40]!r}", pieces


def bomb(rng: random.Random, server: Server) -> tuple[str, Callable[[], Pieces]]:
    head, kind = rng.choice(["200 OK", "500 X", "400 X"]), rng.choice([STREAM, "Content-Type: a/b"])
    begin = b"data: " if rng.random() < 0.5 else b""
    data = gzip.compress(begin + bytes(50_000_000))
    data = data + gzip.compress(bytes(50_000_000)) * 20
    name = rng.choice(["gzip", "deflate", "gzip, gzip", "br", "zstd", "x"])
    sent = http(head, [kind, f"Content-Encoding: {name}", "Retry-After: 0"], data)
    return f"{name} {head} {kind}", lambda: iter([sent])


def garbage(rng: random.Random, server: Server) -> tuple[str, Callable[[], Pieces]]:
    sent = rng.choice([
        rng.randbytes(300), b"", b"\r\n" * 9, b"HTTP/9.9 200 OK\r\n\r\n", b"HTTP/1.1 -1 X\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nX: \x1b]0;a\x07\r\nY\r\n\r\n", f"HTTP/1.1 {KEY}\r\n\r\n".encode(),
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000 + b"\r\n", b"<html>" + KEY.encode(),
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", b"\x16\x03\x01\x02",
    ])  # fmt: skip
    return repr(sent[:60]), lambda: iter([sent])


def good(rng: random.Random, server: Server) -> tuple[str, Callable[[], Pieces]]:
    sent = http("200 OK", [STREAM], f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n".encode())
    return "answer", lambda: iter([sent])


ATTACKS: dict[str, Callable[[random.Random, Server], tuple[str, Callable[[], Pieces]]]] = {
    "status": status, "redirect": redirect, "chunk": chunk, "event": events, "slow": slow,
    "cut": cut, "endless": endless, "bomb": bomb, "garbage": garbage, "good": good,
}  # fmt: skip


def http(line: str, headers: list[str], body: bytes) -> bytes:
    """An HTTP answer; it ends with the connection unless a header says otherwise."""
    return "\r\n".join([f"HTTP/1.1 {line}", *headers, "Connection: close", "", ""]).encode() + body


def changed(rng: random.Random, content: dict[str, Any]) -> str:
    """JSON in which one or two values are others, are missing or come twice."""
    content = json.loads(json.dumps(content))
    marks = []
    for number in range(rng.choice([1, 1, 2])):
        inner: Any = content
        while True:
            key = rng.choice([*inner]) if isinstance(inner, dict) else rng.randrange(len(inner))
            if isinstance(inner[key], (dict, list)) and inner[key] and rng.random() < 0.8:
                inner = inner[key]
                continue
            break
        if rng.random() < 0.2:
            del inner[key]
        else:
            inner[key] = f"@{number}@"
        if not content:
            break
        marks.append((f'"@{number}@"', rng.choice(VALUES)))
    text = json.dumps(content)
    for mark, value in marks:
        text = text.replace(mark, value)
    return text


@contextlib.contextmanager
def watched(problems: list[str]) -> Iterator[None]:
    """Adds what the body leaves behind to `problems`."""
    files, threads = len(os.listdir("/dev/fd")), threading.active_count()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    ends = time.monotonic() + 10
    while True:
        open_files, alive = len(os.listdir("/dev/fd")) - files, threading.active_count() - threads
        if (open_files <= 0 and alive <= 2) or time.monotonic() > ends:  # asyncio keeps no threads
            break
        time.sleep(0.01)
    if open_files > 0:
        problems.append(f"{open_files} open files are left")
    if alive > 2:
        problems.append(f"{alive} threads are left")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    if grown > MAX_KILOBYTES:
        problems.append(f"{grown / 1000:.0f} MB more memory")


def check_text(text: str, problems: list[str], one_line: bool = True) -> None:
    """Adds what is wrong with a text for the user to `problems`."""
    if KEY in text:
        problems.append(f"the key is in {text[:200]!r}")
    if one_line and (len(text) > 700 or "\n" in text.strip()):
        problems.append(f"not one line: {text[:200]!r} ({len(text)} characters)")


def sampled(policy: Any, server: Server, pieces: Callable[[], Pieces]) -> str:
    """What is wrong after two requests to a server with these answers."""
    problems: list[str] = []
    server.pieces, server.stop, server.asked_other = pieces, threading.Event(), 0
    with watched(problems):
        sampler = OpenAISampler(policy, server.url, "m", timeout=0.8)
        started = time.monotonic()
        try:
            params = SamplingParams(8, seed=1)
            chats = [[{"role": "user", "content": "?"}]] * 2
            for completion in sampler.sample([], params, chats=chats):  # type: ignore[arg-type]
                check_text(completion.text, problems, one_line=False)
                check_text(completion.error, problems)
                if len(completion.token_ids) != len(completion.logprobs):
                    problems.append("another number of log-probs than tokens")
                if completion.error and completion.token_ids:
                    problems.append("tokens of a request that failed")
        except UsageError as error:
            check_text(str(error), problems)
        check_text(sampler.latest, problems, one_line=False)
        if time.monotonic() - started > 15:
            problems.append(f"{time.monotonic() - started:.1f} s for a timeout of 0.8 s")
        server.stop.set()
        server.settle()
    if server.asked_other:
        problems.append("a redirect was followed")
    return "; ".join(problems)


def evaluated(context: Any, folder: Path, server: Server, pieces: Callable[[], Pieces]) -> str:
    """What is wrong after a run of train.py that evaluates a server with these answers."""
    server.pieces, server.stop, server.asked_other = pieces, threading.Event(), 0
    problems = run(context, folder, [*RUN, "--base-url", server.url])
    server.stop.set()
    server.settle()
    return "; ".join(problems + ["a redirect was followed"] * bool(server.asked_other))


def play(context: Any, folder: Path, reset: str, step: str) -> str:
    """What is wrong after a run of train.py whose environment is a remote server."""
    problems = []
    with tempfile.TemporaryDirectory() as name:
        program = Path(name, "server.py")
        program.write_text(SERVER.format(f"exec({reset!r} if '\"reset\"' in line else {step!r})"))
        spec = f"remote:command={sys.executable} -S {program},timeout=0.4"
        problems = run(context, folder, [*PLAY, "--env", spec])
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(program).encode() in process.read_bytes():
                    problems.append("a server is left")
    return "; ".join(problems)


def run(context: Any, folder: Path, args: list[str]) -> list[str]:
    """Runs train.py in a new process; returns what is wrong with how it ends."""
    folder.mkdir()
    try:
        child = context.Process(target=train_in_child, args=(args, str(folder)))
        child.start()
        child.join(28)
        if child.is_alive():
            child.kill()
            child.join()
            return ["hangs"]
        text, errors = ((folder / name).read_text() for name in ("output.txt", "errors.txt"))
        problems: list[str] = []
        if child.exitcode not in (0, 1, 2) or "Traceback" in text + errors:
            problems.append(f"exit code {child.exitcode}: {errors[-300:]!r}")
        if child.exitcode and errors.strip().count("\n"):
            problems.append(f"not one line: {errors[-300:]!r}")
        if found := CONTROL_CHARACTERS.search(text + errors):
            problems.append(f"{found[0]!a} reaches the terminal")
        metrics = folder / "runs/a/metrics.jsonl"
        if child.exitcode == 2 and metrics.parent.exists() and not metrics.stat().st_size:
            problems.append("an empty run is left")
        for path in folder.rglob("*"):
            if path.is_file() and KEY.encode() in path.read_bytes():
                problems.append(f"the key is in {path.name}")
        return problems
    finally:
        shutil.rmtree(folder)


def train_in_child(args: list[str], folder: str) -> None:
    """Runs the command in this process, with its output in two files."""
    os.chdir(folder)
    sys.stdout, sys.stderr = (open(f"{n}.txt", "w", buffering=1)  # noqa: SIM115
                              for n in ("output", "errors"))  # fmt: skip
    os.environ["OPENAI_API_KEY"] = KEY
    import train
    from core import run

    run.OpenAISampler = partial(OpenAISampler, timeout=1.0)  # type: ignore
    sys.exit(train.run_command(args))


@contextlib.contextmanager
def openenv_server() -> Iterator[dict[str, Any]]:
    """Yields {"port": its port, "text": what it answers to every message}."""
    from websockets.sync.server import serve

    state: dict[str, Any] = {"text": ""}

    def answer(connection: Any) -> None:
        with contextlib.suppress(Exception):
            for _ in connection:
                connection.send(state["text"])

    with serve(answer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state["port"] = server.socket.getsockname()[1]
        yield state


def observed(server: dict[str, Any], text: str) -> str:
    """What is wrong after an episode with an OpenEnv server that sends `text`."""
    problems: list[str] = []
    server["text"] = text
    with watched(problems):
        env: Any = make(f"openenv:url=http://127.0.0.1:{server['port']}")
        try:
            with contextlib.suppress(Exception):  # which costs the episode
                json.dumps(env.reset(1))
                checked_step(env.step("x"), "player", True)
        finally:
            env.close()
    return "; ".join(problems)


def hostile_line(rng: random.Random) -> bytes:
    """A request to `environments.adapters.remote`, one line."""
    request = rng.choice([
        {"do": "reset", "seed": 1}, {"do": "step", "response": "x"},
        {"do": "step", "responses": {}}, {"do": "demonstrate", "hasty": False},
        {"do": "guess", "agent": "X", "seed": 1},
    ])  # fmt: skip
    line = changed(rng, request).encode("utf-8", "surrogatepass")
    noise = [line, line, line, b"", rng.randbytes(20).translate(None, b"\r\n"), b"\xff\xfe" + line]
    return rng.choice(noise) + b"\n"


def served(lines: list[bytes]) -> str:
    """What is wrong with the answers of the server of an environment."""
    errors = io.StringIO()
    for spec in ("letter_counting", "tic_tac_toe"):
        requests, answered = io.TextIOWrapper(io.BytesIO(b"".join(lines))), io.StringIO()
        streams = sys.stdin, sys.stdout
        sys.stdin, sys.stdout = requests, answered
        try:
            with contextlib.redirect_stderr(errors):
                remote.serve(spec)
        finally:
            sys.stdin, sys.stdout = streams
        found = [json.loads(line) for line in answered.getvalue().splitlines()]
        if len(found) != len(lines) or not all(isinstance(answer, dict) for answer in found):
            return f"{len(found)} answers to {len(lines)} requests of {spec}"
    return ""


def hostile_request(rng: random.Random) -> bytes:
    """A request to the page of `--web`."""
    body = changed(rng, rng.choice([{"seed": 1}, {"agent": "", "text": "x"},
                                    {"agent": "", "player": "random player"}]))  # fmt: skip
    data = body.encode("utf-8", "surrogatepass")
    data = rng.choice([data, data, data, rng.randbytes(50), b""])
    size = rng.choice([len(data)] * 4 + [0, -1, 10**30, "x", len(data) + 9, "\u00b2"])
    host = rng.choice(["HOST"] * 5 + ["evil.example", "", "HOST\r\nHost: x"])
    paths = ["/act", "/new", "/", "/state", "/../x", "/%00", "http://x/", "/" * 70_000]
    lines = [
        rng.choice(["POST", "POST", "POST", "GET", "PUT", "\x1b"]) + f" {rng.choice(paths)}"
        + rng.choice([" HTTP/1.1"] * 5 + ["", " HTTP/9.9"]),
        f"Host: {host}", "Content-Type: application/json", f"Content-Length: {size}",
        *rng.choice([[], [], ["X: y"] * 200, ["Origin: null"], ["X: " + "y" * 70_000]]),
        "Connection: close",
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + data


def asked(requests: list[bytes]) -> str:
    """What is wrong after these requests to the page of an environment."""
    errors, problems = io.StringIO(), list[str]()
    with watched(problems), contextlib.redirect_stderr(errors):
        server = make_server(Episode(make("tic_tac_toe:opponent=guess"), "t", 1, {}))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            for number, request in enumerate(requests):
                place = ("127.0.0.1", server.server_port)
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(place) as client,
                ):
                    client.settimeout(15)
                    host = f"127.0.0.1:{server.server_port}".encode()
                    client.sendall(request.replace(b"HOST", host))
                    if number % 3 == 0:
                        continue  # closed without reading
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):
                        pass
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
    check_text(errors.getvalue(), problems, one_line=False)
    if "Traceback" in errors.getvalue():
        problems.append(errors.getvalue()[-300:])
    return "; ".join(problems)
