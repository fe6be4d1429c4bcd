"""No request goes to another host, and no secret is written to a file or the screen."""

import json
import socket
import threading
import zipfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

import pytest
from conftest import LoopbackServer
from test_openai_sampler import Server
from test_wikipedia_maze import visit

from core import openai_sampler
from core.types import UsageError
from environments import wikipedia
from environments.base import EnvFailure
from environments.wikipedia_maze import WikipediaMaze

SMALL = """--sft-steps 4 --sft-batch-size 4 --num-updates 2 --num-prompts 2 --group-size 2
    --eval-num-tasks 2 --max-tokens 8 --device cpu""".split()


OTHER_HOSTS = [  # links of a page; the policy asks for them too
    *("//evil.example/wiki/Evil", "https://evil.example/wiki/Evil", "http:/evil.example/wiki/Evil"),
    *("\\\\evil.example\\wiki\\Evil", "/\\evil.example/wiki/Evil", "file:///wiki/Evil"),
    *("https://127.0.0.1@evil.example/wiki/Evil", "javascript:alert(1)", "ftp://h/wiki/Evil"),
    "data:text/html,Evil",
]
TITLES = ["/evil.example/A", "../../evil.example/B?c=d&page=C", "@evil.example"]  # valid titles


class Wiki(BaseHTTPRequestHandler):
    """A page full of links to other hosts; 'Away <status>' is a redirect to the other server."""

    def do_GET(self):
        self.server.asked.append(self.path)
        title = self.path.partition("page=")[2].partition("&")[0]
        if title.startswith("Away"):
            self.send_response(int(title[-3:]))
            self.send_header("Location", self.server.other_url)
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Refresh", f"0; url={self.server.other_url}")
        self.end_headers()
        links = [
            *OTHER_HOSTS,
            *(f"/wiki/{title}" for title in TITLES),
            *(f"/wiki/Away_{n}" for n in (301, 302, 303, 307, 308)),
        ]
        text = "".join(f'<p>see <a href="{link}">x</a></p>' for link in links)
        answer = {"parse": {"title": title, "text": f"{text}<base href='//evil.example/'>"}}
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args):
        pass


def serve(handler):
    server = LoopbackServer(handler)
    server.asked = []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


@pytest.fixture
def wiki(monkeypatch):
    """(base_url, server, another server, the addresses that this process connected to)"""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    wikipedia.fetch_page.cache_clear()
    here, there = serve(Wiki), serve(Wiki)
    here.other_url = f"http://127.0.0.1:{there.server_port}/w/api.php?page=Evil"
    connected, saved = [], socket.create_connection

    def connect(address, *args, **options):
        connected.append(address)
        return saved(address, *args, **options)

    monkeypatch.setattr(socket, "create_connection", connect)
    yield f"http://127.0.0.1:{here.server_port}/w/api.php", here, there, connected
    for server in (here, there):
        server.shutdown()
        server.server_close()
    wikipedia.fetch_page.cache_clear()


def test_the_live_wiki_asks_no_other_host(wiki):
    base_url, here, there, connected = wiki
    env = WikipediaMaze(live=True, base_url=base_url, start="Home", target="Deep", max_visits=99)
    for wish in OTHER_HOSTS:
        env.reset(0)
        assert env.links[: len(TITLES) + 1] == [*TITLES, "Away 301"]
        assert env.step(visit(wish)).reward < 0  # not a link of this page
    for title in TITLES:
        env.reset(0)
        assert not env.step(visit(title)).done
        assert here.asked[-1].startswith(f"/w/api.php?action=parse&page={quote(title, safe='')}&")
    for status in (301, 302, 303, 307, 308):
        env.reset(0)
        with pytest.raises(EnvFailure, match=f"Away {status}: HTTP status {status}"):
            env.step(visit(f"Away {status}"))
    assert len(here.asked) > 5 and there.asked == []
    assert set(connected) == {("127.0.0.1", here.server_port)}


@pytest.mark.parametrize(
    "base_url",
    ["https://en.wikipedia.org@evil.example/api.php", "https://en.wikipedia.org\\@evil.example/",
     "//evil.example/", "file:///etc/passwd", "http://localhost.evil.example/"],
)  # fmt: skip
def test_a_base_url_that_hides_its_host_is_rejected(base_url):
    with pytest.raises(UsageError, match="base_url"):
        WikipediaMaze(live=True, base_url=base_url)


SECRETS = {
    "OPENAI_API_KEY": "sk-openai-61f0c2", "HF_TOKEN": "hf_hub_93be1d",
    "WANDB_API_KEY": "wandb-5527aa", "FOO_SECRET": "foo-secret-c04e77",
}  # fmt: skip


def leaks(folder):
    """(file, name of the secret) for each secret in a file's name, its content or an archive."""
    found = []
    for path in folder.rglob("*"):
        texts = [str(path).encode()]
        if path.is_file():
            texts.append(path.read_bytes())
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    texts += [archive.read(name) for name in archive.namelist()]
        found += [(path.name, key) for key, secret in SECRETS.items()
                  if any(secret.encode() in text for text in texts)]  # fmt: skip
    return sorted(found)


@pytest.fixture
def secrets(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def server():
    server = serve(Server)
    server.failures, server.finish = [], "stop"
    server.retry_after, server.broken = {"retry-after-ms": "1"}, {}
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield server
    server.shutdown()
    server.server_close()


def test_a_run_writes_no_secret_of_its_environment(command, secrets):
    code, out, err = command("--run-name", "a", *SMALL)
    assert (code, err) == (0, "")
    assert len(list(Path("runs/a").rglob("*"))) > 10 and leaks(Path("runs")) == []
    assert not [secret for secret in SECRETS.values() if secret in out]


def test_a_run_with_a_server_writes_no_key(command, secrets, server):
    flags = "--sampler openai --num-updates 0 --eval-num-tasks 4 --run-name a --model-id m".split()
    code, out, err = command(*flags, "--base-url", server.url)
    assert (code, err) == (0, "")
    assert {key for _, _, key in server.asked} == {f"Bearer {SECRETS['OPENAI_API_KEY']}"}
    assert leaks(Path("runs")) == []
    assert not [secret for secret in SECRETS.values() if secret in out]


def test_a_server_that_repeats_the_key_does_not_bring_it_to_the_screen(
    policy, secrets, monkeypatch
):
    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(401)
            self.end_headers()
            self.wfile.write(f"wrong key: {self.headers['Authorization']}".encode())

        def log_message(self, *args):
            pass

    server = serve(Refusing)
    sampler = openai_sampler.OpenAISampler(policy, f"http://127.0.0.1:{server.server_port}", "m")
    params = openai_sampler.SamplingParams(max_tokens=4)
    with pytest.raises(UsageError, match=r"wrong key: Bearer \[key\]"):
        sampler.sample([], params, chats=[[{"role": "user", "content": "?"}]])
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("address", ["user:{}@127.0.0.1:9/v1", "127.0.0.1:9/v1?key={}"])
def test_a_password_in_a_url_is_rejected_and_not_repeated(command, address):
    url = f"http://{address.format(SECRETS['FOO_SECRET'])}"
    flags = "--sampler openai --num-updates 0 --run-name a".split()
    code, out, err = command(*flags, "--base-url", url)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "--base-url" in err
    assert SECRETS["FOO_SECRET"] not in err and leaks(Path(".")) == []
