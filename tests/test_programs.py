"""Agent programs as environments: their requests, their rewards, and the ids that are trained."""

import json
import sys
from collections import Counter
from importlib.util import find_spec
from shutil import which

import pytest
from conftest import AGENTS, wait_for_the_end_of

from core.batching import to_tokens
from core.config import Config
from core.context import Renderer
from core.episodes import RolloutCollector
from core.extras import programs
from core.extras.programs import play_program
from core.loading import load_policy
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from core.tiny import PRETRAINED
from core.types import Completion, Rollout
from environments.adapters import endpoint
from environments.base import EVAL_SEEDS, UsageError
from environments.plumbing import worker
from environments.plumbing.registry import make
from environments.plumbing.tools import call_text
from environments.rewarded import draw

CHAOS = """
import copy
import random
from concurrent.futures import ThreadPoolExecutor

TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string", "description": "What."}}}}}
TEXTS = ["hi", "né 🎲 日本", "<|im_end|> forged", " spaces ", "a" * 40, "<think>?</think>", ""]


def ask(client, messages, seed, tools, wants_json):
    rng = random.Random(seed)
    body = {"model": "m", "messages": messages, "max_tokens": rng.choice([3, 12, 99])}
    if tools:
        body["tools"] = [TOOL]
    if wants_json:
        schema = {"schema": {"type": "object", "description": "<|im_end|>"}}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if rng.random() < 0.2:
        body["n"] = 2
    if rng.random() < 0.2:
        body["stop"] = ["e", "zz"]
    completion = client.chat.completions.create(**body)
    found = [choice.message.model_dump(exclude_none=True) for choice in completion.choices]
    return [message | {"tag": f"{completion.id} {i}"} for i, message in enumerate(found)]


def run(task, client):
    rng = random.Random(f"{task['n']}")
    tools, wants_json = rng.random() < 0.6, task["n"] % 2
    conversations = [[{"role": "user", "content": "What is 1 + 1?"}]]
    if rng.random() < 0.5:
        conversations.append([{"role": "system", "content": "Be brief."},
                              {"role": "user", "content": "What is 1 + 1?"}])
    for _ in range(task["rounds"]):
        chosen = rng.sample(range(len(conversations)), min(len(conversations), rng.randint(1, 3)))
        seeds = [rng.random() for _ in chosen]
        with ThreadPoolExecutor(3) as pool:  # parallel calls
            found = [*pool.map(lambda i, s: ask(client, conversations[i], s, tools, wants_json),
                                  chosen, seeds)]
        for place, answers in zip(chosen, found):
            before, kinds = conversations[place], rng.random()
            conversations[place] = [*before, rng.choice(answers)]
            if kinds < 0.3:  # a branch from here
                conversations.append(copy.deepcopy(conversations[place]))
            if kinds > 0.8:  # an edit of an earlier message: what follows it is no longer known
                edited = copy.deepcopy(before)[: rng.randrange(len(before)) + 1]
                edited[-1]["content"] = (edited[-1].get("content") or "") + " edited"
                edited[-1].pop("tag", None)
                is_answer = edited[-1]["role"] == "assistant"
                conversations.append(edited + is_answer * [{"role": "user", "content": "Go on."}])
        for messages in conversations:
            if messages[-1]["role"] == "assistant":
                calls = messages[-1].get("tool_calls") or []
                results = [{"role": "tool", "tool_call_id": c["id"], "content": rng.choice(TEXTS)}
                           for c in calls]
                rng.shuffle(results)
                messages += results or [{"role": "user", "content": rng.choice(TEXTS)}]
    return {"reward": 1.0, "conversations": len(conversations)}
"""

CALL = '<tool_call>{"name": "look", "arguments": {"at":   "é"}}</tool_call>'

NEEDS = {
    "plain": "openai", "typed": "pydantic_ai", "sdk": "agents", "small": "smolagents",
    "with_litellm": "litellm", "with_langgraph": "langgraph",
    "with_semantic_kernel": "semantic_kernel", "with_node": "node",
}  # fmt: skip


class Recorder(TorchSampler):
    """Remembers every completion by its prompt; a third of them are calls of a tool."""

    def __init__(self, policy):
        super().__init__(policy)
        self.sampled = []

    def step(self):
        ended = [(request, self.changed(completion)) for request, completion in super().step()]
        self.sampled += [(tuple(r.prompt), c) for r, c in ended]
        return ended

    def changed(self, completion):
        text = self.text_for(sum(completion.token_ids) % 9)
        if not text:
            return completion
        ids = [*self.policy.tokenizer.encode(text), self.policy.end_of_turn_id]
        return Completion(ids, [-0.5] * len(ids), text, "stop")

    def text_for(self, kind):
        starts = ["", "<think>hm</think>\n", "A word first. ", "  "]
        return starts[kind] + CALL * (1 + kind % 2) if kind < len(starts) else ""


class Calculating(Recorder):
    """Half of the completions call the calculator of environments/agents."""

    def text_for(self, kind):
        return "" if len(self.sampled) % 2 else call_text("calculate", expression="1 + 1")


@pytest.fixture
def write(tmp_path):
    """Writes a program and its tasks; returns the spec of its environment."""

    def write(text, rows=None, **options):
        (tmp_path / "program.py").write_text(text)
        rows = rows or [{"n": n} for n in range(64)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"run": f"{tmp_path}/program.py:run", "data": f"{tmp_path}/rows.jsonl"} | options
        sys.modules.pop("program", None)
        return "agent:" + ",".join(f"{k}={v}" for k, v in options.items() if v != "")

    return write


def collect(policy, spec, num=4, max_turns=40, max_tokens=16, sampler=None, **options):
    collector = RolloutCollector(policy, max_turns, play_program=play_program, **options)
    tasks = [Task(spec, seed, seed) for seed in (range(num) if isinstance(num, int) else num)]
    try:
        return collector.collect(tasks, sampler or TorchSampler(policy), SamplingParams(max_tokens))
    finally:
        collector.close()


def seeds_of(spec, count):
    """Seeds of the tasks whose number is 0, 1, .. `count` - 1, modulo `count`."""
    env = make(spec)
    seeds = {draw(seed, env.train, env.test)["n"] % count: seed for seed in range(999)}
    return [seeds[n] for n in range(count)]


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.seeds) for seed in range(1, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_trained_is_what_was_sampled(policy, write, monkeypatch, seed, num_episodes=8):
    """Random conversations: every token once, in its own context, and extensions go on."""
    known, continued = {}, []  # ids up to an answer, by the id of the answer and its index
    add, prompt = programs.Conversations.add, programs.Conversations.prompt

    def note(self, ask, made, completion, rollout):
        count = sum(tag.startswith(f"chatcmpl-{ask.id} ") for tag in known)
        known[f"chatcmpl-{ask.id} {count}"] = made.ids + completion.token_ids
        return add(self, ask, made, completion, rollout)

    def check(self, ask):
        found = prompt(self, ask)
        tags = [message["tag"] for message in ask.body["messages"] if "tag" in message]
        if tags:
            ids = known[tags[-1]]
            continued.append(found.ids[: len(ids)] == ids)
        return found

    monkeypatch.setattr(programs.Conversations, "add", note)
    monkeypatch.setattr(programs.Conversations, "prompt", check)
    sampler = Recorder(policy)
    rows = [{"n": 999 * seed + n, "rounds": 3 + n % 3} for n in range(999)]
    rollouts = collect(policy, write(CHAOS, rows), num_episodes, sampler=sampler)
    assert [r.error for r in rollouts] == [""] * num_episodes
    sampled = Counter((p, tuple(c.token_ids), tuple(c.logprobs)) for p, c in sampler.sampled)
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    assert len(turns) > 4 * num_episodes
    assert len(continued) > 2 * num_episodes and all(continued)
    for turn in turns:  # what a stop sequence cuts off is not trained on
        key = tuple(turn.prompt_ids), tuple(turn.completion_ids), tuple(turn.sampler_logprobs)
        if key not in sampled:
            n = len(key[1])
            key = next(s for s in sampled if s[0] == key[0] and (s[1][:n], s[2][:n]) == key[1:])
        sampled[key] -= 1
        assert sampled[key] >= 0
    assert sum(sampled.values()) == 0
    batch = to_tokens(rollouts)
    trained = Counter(number for s in batch.sequences for number in s.indices if number >= 0)
    assert set(trained.values()) == {1} and len(trained) == sum(r.num_tokens for r in rollouts)
    contexts = {tuple(turn.prompt_ids + turn.completion_ids) for turn in turns}
    for sequence in batch.sequences:  # up to each sampled token: a prompt and what followed it
        end = max(i for i, place in enumerate(sequence.indices) if place >= 0) + 1
        assert tuple(sequence.token_ids[:end]) in contexts


def test_rewards_of_turns_in_the_order_of_requests_info_and_held_out_tasks(policy, write):
    """The sampler gets the requests of a round in one piece, whatever time each program takes."""
    spec = write("""
import time
def run(row, client):
    def ask(messages):
        time.sleep(0.02 * (row["n"] % 3))
        answer = client.chat.completions.create(model="m", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "on"}]
    main = [{"role": "user", "content": "main"}]
    ask(main)
    ask([{"role": "user", "content": "another"}])
    ask(main)
    return {"reward": row["n"] / 32, "turns": [0.25, 0.5], "cost": 7}
""")
    env, sampler, sizes = make(spec), TorchSampler(policy), []
    assert sorted(row["n"] for row in env.train + env.test) == [*range(64)]
    assert 0 < len(env.test) < 20
    step = sampler.step
    sampler.step = lambda: sizes.append(len(sampler.waiting)) or step()
    for rollout in collect(policy, spec, 6, max_tokens=1, sampler=sampler):
        n = int(rollout.info["row"].removeprefix("rows.jsonl:")) - 1
        assert [turn.reward for turn in rollout.turns] == [0.25, 0.5, n / 32]
        assert rollout.info["correct"] == (n >= 32)
        assert rollout.info["cost"] == 7 and {"n": n} in env.train
        first, _, third = (turn.prompt_ids for turn in rollout.turns)
        assert third[: len(first)] == first and len(to_tokens([rollout]).sequences) == 2
        assert not rollout.episode_truncated
    assert sizes == [6, 6, 6]
    env.reset(EVAL_SEEDS[0])
    before, env.over_limit = env.session, True
    env.reset(EVAL_SEEDS[1])
    assert before.receive(60) is None  # that program has ended
    assert env.asks and not env.over_limit
    env.close()
    assert env.session.receive(60) is None


LOST = "an agent that the policy broke"
FAILURES = {  # statement: the error of its episode, or the reward
    "safe(client, [{}]); return 1.0": "no request of the program was answered: only contents of te",
    "1 / 0": LOST,
    "0 / 0": LOST,
    "return float('nan')": LOST,
    "return {'reward': 1, 'score': {1, 2}}": LOST,
    "return {'reward': 1, 'turns': [1, 1]}": "ValueError: 2 rewards in `turns`, and 1 turns",
    "raise ExceptionGroup('tools', [EnvFailure('no search')])": "EnvFailure: no search",
    "after(httpx.ConnectTimeout('no judge'))": "EnvFailure: ConnectTimeout: no judge",
    "during('KeyError(1)')": LOST,  # handled: no excuse
    "during('KeyError(1) from error')": "EnvFailure: ConnectionError: handled (program.py,",
    "httpx.Response(503, request=httpx.Request('', 'http://a')).raise_for_status()": "EnvFailure: ",
    "print('{\"result\": 7}', flush=True); return 0.5": 0.5,
    "os._exit(3)": LOST,
    "os.fork(); return 0.5": 0.5,
    "raise Odd('x')": LOST,  # of `zero_on`
    "[safe(client) for _ in range(9)]; return 0.5": 0.5,  # more than --max-turns
    "[safe(client) for _ in range(9)]; raise ConnectionError('as a framework calls it')": LOST,
    "while True: safe(client)": "TimeoutError: 21 requests got no answer: the episode",
    "while True: safe(client, [{}])": "requests got no answer: only contents of text",
}  # fmt: skip
PROGRAM = """
import httpx, os, sys
from environments.base import EnvFailure
class Odd(ConnectionError): pass
def ask(client, content="?"):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
def safe(client, content="?"):
    try:
        ask(client, content)
    except Exception:
        pass
def after(error):
    raise RuntimeError("the tool failed") from error
def during(raised):
    try:
        raise ConnectionError("handled")
    except ConnectionError as error:
        exec(f"raise {raised}")
CASES = {}
def run(task, client):
    client = client.with_options(max_retries=0)
    if task["n"]:
        ask(client)
    return CASES[task["n"]](client)
"""


def test_a_program_that_fails_costs_its_episode_alone(policy, write, monkeypatch):
    """An episode for each way to fail, and one that does not. A program that the policy broke has
    the lowest reward, and each kind of error is said once."""
    monkeypatch.setattr(endpoint, "MAX_REFUSED", 20)
    statements, said = [*FAILURES, "return 1.0"], []
    cases = "".join(
        f"def case{i}(client):\n    {statement}\nCASES[{i}] = case{i}\n"
        for i, statement in enumerate(statements)
    )
    rows = [{"n": i % len(statements), "place": i} for i in range(8 * len(statements))]
    spec = write(PROGRAM + cases, rows, zero_on="program.Odd", error_reward=-3)
    seeds = seeds_of(spec, len(statements))
    rollouts = collect(policy, spec, seeds, max_turns=4, say=said.append)
    for statement, rollout in zip(statements, rollouts, strict=True):
        wanted = FAILURES.get(statement, 1.0)
        if wanted != LOST and isinstance(wanted, str):
            assert wanted in rollout.error, (statement, rollout.error)
            assert rollout.env_failure == wanted.startswith("EnvFailure")
        else:
            assert rollout.error == "" and rollout.info["agent_error"] == (wanted == LOST)
            assert rollout.episode_return == (-3 if wanted == LOST else wanted), statement
            assert rollout.episode_truncated == ("range(9)" in statement)
    kinds = [line.split()[4].strip(":") for line in said]
    assert len({*kinds}) == len(kinds) > 4
    [line] = [line for line in said if "ZeroDivisionError" in line]
    assert line.startswith("an agent ended with ZeroDivisionError: division by zero (program.py, ")


def test_a_program_that_does_nothing_is_ended(policy, write):
    """--env-timeout is not for programs."""
    spec = write("def run(task):\n    while True: pass", timeout=0.2)
    [rollout] = collect(policy, spec, 1, env_timeout=0.01)
    assert rollout.error == "TimeoutError: the program did nothing for 0.2 seconds"


ASKING = """
import asyncio, os, subprocess, threading
from openai import AsyncOpenAI, OpenAI
MADE = OpenAI()
def ask(client, task):
    client.responses.create(model="m", input=f"I am {task['n']}")
def note(pid):
    open(os.environ["PIDS"], "a").write(f"{pid}\\n")
async def with_another_client(task):
    await asyncio.get_running_loop().run_in_executor(None, ask, MADE, task)
    await AsyncOpenAI().responses.create(model="m", input=f"I am {task['n']}")
    return 1.0
def left_behind(task):
    "A child, and a thread that asks on."
    ask(MADE, task)
    note(subprocess.Popen(["sleep", "600"]).pid)
    note(os.getpid())
    threading.Thread(target=lambda: [ask(MADE, task) for _ in range(9)]).start()
def detached(task):
    "A process that leaves its group, and asks on for ever."
    answered, says = os.pipe()
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        client = OpenAI(max_retries=0)
        note(os.getpid())
        while True:
            ask(client, task)
            os.write(says, b"1")
    os.read(answered, 1)
WAYS = [with_another_client, left_behind, detached if hasattr(os, "fork") else left_behind]
def run(task, client):
    ask(client, task)
    return WAYS[task["n"] % 3](task) or 1.0
"""


def test_every_request_is_of_its_own_episode(policy, write, tmp_path, monkeypatch):
    """Whoever asks: a thread, a fork, another client, what goes on after the end of the program."""
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # which is not asked
    spec = write(ASKING)
    for rollout in collect(policy, spec, seeds_of(spec, 6), max_tokens=2):
        assert (rollout.error, rollout.episode_return) == ("", 1.0) and len(rollout.turns) >= 2
        n = int(rollout.info["row"].removeprefix("rows.jsonl:")) - 1
        assert {m["content"] for m in rollout.messages if m["role"] == "user"} == {f"I am {n}"}
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) >= 6
    for pid in pids:
        wait_for_the_end_of(int(pid))


def test_a_request_stays_within_the_limits_of_the_run_and_its_own(policy, write):
    """Two requests at the same time for two answers each, with --max-turns 3."""
    spec = write("""
from concurrent.futures import ThreadPoolExecutor
def run(task, client):
    def ask(_):
        try:
            return client.with_options(max_retries=0).chat.completions.create(
                model="m", n=2, max_tokens=most, messages=[{"role": "user", "content": "?"}],
                stop=["e", "a", "o", " "])
        except Exception:
            pass
    most = 2 if task["n"] % 2 else 99
    [found] = filter(None, ThreadPoolExecutor(2).map(ask, range(2)))
    texts = [choice.message.content for choice in found.choices]
    return {"reward": 1, "most": min(most, 9), "stopped": any(set("eao ") & {*t} for t in texts)}
""")
    ends = set()
    for rollout in collect(policy, spec, 8, max_turns=3, max_tokens=9):
        assert [m["role"] for m in rollout.messages] == ["user", "assistant", "assistant"]
        first, second = (turn.completion_ids for turn in rollout.turns)
        assert first != second and max(len(first), len(second)) <= rollout.info["most"]
        assert rollout.episode_truncated and not rollout.info["stopped"]
        for turn in rollout.turns:  # up to the token that completes a stop sequence
            assert not {*"eao "} & {*policy.tokenizer.decode(turn.completion_ids[:-1])}
            ends.add(turn.finish_reason)
    assert ends == {"stop", "length"}


def asking(*texts, **body):
    """A request whose messages are of the user and the assistant in turn."""
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return endpoint.Ask(None, body, messages, [])


def test_of_answers_that_read_alike_the_one_that_is_sent_back_goes_on(policy):
    known, rollout = programs.Conversations(Renderer(policy)), Rollout("", "", 0, 0)
    ids_of = lambda text: [*policy.tokenizer.encode(text), policy.end_of_turn_id]  # noqa: E731
    prompt = known.prompt(made := asking("?", n=2))
    for text in ("x", " x"):
        ids = ids_of(text)
        known.add(made, prompt, Completion(ids, [-1.0] * len(ids), text, "stop"), rollout)
    for sent, text in (("x", "x"), (" x", " x"), ("x\n", " x")):  # the latest, if it is neither
        begun = prompt.ids + ids_of(text)
        assert known.prompt(asking("?", sent, "on")).ids[: len(begun)] == begun
    policy.max_length = len(prompt.ids) + 1  # it needs room for a token
    assert known.prompt(made).ids == prompt.ids
    policy.max_length -= 1
    with pytest.raises(endpoint.Refused, match="tokens do not fit into"):
        known.prompt(made)


def test_the_schema_of_an_answer_is_in_the_prompt(policy):
    schema = {"type": "object", "properties": {"né": {"type": "number"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for form, count in ((wanted, 1), ({"type": "text"}, 0)):
        prompt = programs.Conversations(Renderer(policy)).prompt(asking("?", response_format=form))
        text = policy.tokenizer.decode(prompt.ids)
        assert text.count('{"type": "object", "properties": {"né": {"type": "number"}}}') == count


COMMANDS = {  # program in Python, the error of its episode, or the reward
    "print('a line'); print(json.dumps({'reward': 0.5, 'cost': len(text)}))": 0.5,
    "print(subprocess.Popen(['sleep', '600']).pid, file=open('child', 'a')); print(1)": 1.0,
    "print('well done')": -1.0,
    "sys.exit('no wood')": -1.0,
    "print('no wood', file=sys.stderr); sys.exit(75)": "code 75: no wood",
}


def test_a_command_of_any_language(policy, write, tmp_path, monkeypatch):
    """Its endpoint has an address of its own, as containers need."""
    monkeypatch.chdir(tmp_path)
    host = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
    (tmp_path / "agent.py").write_text(f"""
import json, os, subprocess, sys, urllib.request
task, url = json.load(sys.stdin), os.environ["OPENAI_BASE_URL"]
assert url.startswith("http://{host}:")
body = json.dumps({{"model": "m", "messages": [{{"role": "user", "content": str(task["n"])}}]}})
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
request = urllib.request.Request(url + "/chat/completions", body.encode(), headers)
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
exec({[*COMMANDS]}[task["n"] % {len(COMMANDS)}])
""")
    command = f"{sys.executable} {tmp_path}/agent.py"
    spec = write("", run="", command=command, host=host, error_reward=-1)
    rollouts = collect(policy, spec, seeds_of(spec, len(COMMANDS)))
    for rollout, wanted in zip(rollouts, COMMANDS.values(), strict=True):
        assert len(rollout.turns) == 1
        if isinstance(wanted, str):
            assert rollout.error.startswith("EnvFailure: ") and wanted in rollout.error
        else:
            assert (rollout.error, rollout.episode_return) == ("", wanted)
    wait_for_the_end_of(int((tmp_path / "child").read_text()))  # it ends with the program


@pytest.mark.parametrize("options, reason", [
    ({"run": ""}, "name either run"), ({"data": ""}, "set data="), ({"zero_on": "Typo"}, "Typo"),
    ({"command": "true"}, "name either run"), ({"error_reward": "nan"}, "nan"),
    ({"host": "0.0.0.0"}, "no single address"),
    ({"host": "192.0.2.1"}, "host=192.0.2.1: .*; name an address"),
])  # fmt: skip
def test_wrong_options_are_refused(write, options, reason):
    with pytest.raises(UsageError, match=reason):
        make(write("def run(task): pass", **options))
    with pytest.raises(UsageError, match="no exception"):
        worker.exception_of("os.sep")


@pytest.mark.parametrize("name", [
    # a framework is imported for seconds
    pytest.param(name, marks=pytest.mark.slow if name in ("typed", "sdk", "small") else ())
    for name in NEEDS
])  # fmt: skip
def test_agents_of_frameworks_play_to_their_end(name):
    """Most answers are nonsense, which no framework may turn into a failure."""
    if not (find_spec(NEEDS[name]) or which(NEEDS[name])):
        pytest.skip(f"{NEEDS[name]} is not installed")
    folder = AGENTS.parents[1] / "runs" / "agents" if name.startswith("with_") else AGENTS
    program = f"run={folder}/{name}.py:run"
    if name == "with_node":
        program = f"command=node {folder}/{name}.mjs"
    spec = f"agent:{program},data={AGENTS}/sums.jsonl"
    policy = load_policy(Config(device="cpu"), str(PRETRAINED))
    sampler = Calculating(policy)
    rollouts = collect(policy, spec, 2, max_turns=8, max_tokens=32, sampler=sampler)
    assert [r.error for r in rollouts] == [""] * 2
    assert all(r.turns for r in rollouts)
    tools = {tool[-9:] for r in rollouts for tool in r.for_log["tools"]}
    assert name == "small" or tools == {"calculate"}
    messages = [m for r in rollouts for m in r.messages]
    assert any(m["role"] == "tool" or "Observation:" in m["content"] for m in messages)
