"""`python -m environments`: the list, an episode to watch, an episode to play."""

import re
import sys

import pytest

import environments.__main__ as command
from core.types import UsageError
from environments.base import MultiAgentEnv, Step
from environments.registry import ENVIRONMENTS, list_envs

# openenv needs a server, pettingzoo pygame; remote is tested with an environment of its own
ELSEWHERE = {"openenv", "pettingzoo", "remote", "rewarded"}
BUILT_IN = {name for name, env in ENVIRONMENTS.items() if isinstance(env, str)}  # not of tests
SPECS = [
    *sorted(BUILT_IN - ELSEWHERE), "tic_tac_toe:opponent=self",
    "iterated_game:opponent=self", "gymnasium:id=Acrobot-v1,max_steps=9",
    "textarena:id=ConnectFour-v0", "textarena:id=Poker-v0", "remote:env=snake",
]  # fmt: skip


class NoPlayer(MultiAgentEnv):
    """Has neither demonstrations nor a random player, and names no moves."""

    def reset(self, seed):
        return {"a": [{"role": "user", "content": "Say something, [Player 1]."}]}

    def step(self, responses):
        return {"a": Step(None, 0.0, True)}


@pytest.fixture
def run(capsys):
    """Runs `python -m environments ARGS`; returns (exit code, stdout, stderr)."""

    def run(*args):
        try:
            code = command.run_command([str(arg) for arg in args])
        except SystemExit as end:  # raised by tyro
            code = end.code
        return code, *capsys.readouterr()

    return run


def printed_return(out):
    return float(re.search(r"sum of rewards: (\S+)\n$", out)[1])


def test_list_names_every_environment_with_its_options(run):
    code, out, _ = run()
    assert code == 0 and all(name[:8] in out for name in list_envs())
    assert "n_hops" in out and "opponent" in out


@pytest.mark.parametrize("answer", [
    '{"error": "\\u001b[2J"}', '{"messages": [{"content": "\\u001b[2J"}]}', "[]",
])  # fmt: skip
def test_what_a_server_answers_is_one_line(run, tmp_path, answer):
    server = tmp_path / "server.py"
    server.write_text(f"import sys\nfor line in sys.stdin: print({answer!r}, flush=True)\n")
    code, out, err = run("show", f"remote:command={sys.executable} {server}")
    assert code in (1, 2) and err.count("\n") == 1 and "\x1b" not in out + err


@pytest.mark.parametrize("spec", SPECS)
def test_show_plays_every_environment_and_repeats_the_episode_of_a_seed(spec, run):
    code, out, _ = run("show", spec, "--seed", 1)
    assert run("show", spec, "--seed", 1) == (0, out, "") and code == 0
    rewards = [float(x) for x in re.findall(r" ?reward ([+-]\S+)\n", out)]
    assert rewards and printed_return(out) == pytest.approx(sum(rewards), abs=0.01)
    assert ("demonstrator: " in out) != ("random player: " in out)


@pytest.mark.parametrize(
    "spec", ["tic_tac_toe:opponent=self", "iterated_game:opponent=self", "textarena"]
)
def test_random_player_makes_valid_moves_that_depend_on_the_seed(spec, run):
    episodes = set()
    for seed in range(8):
        _, out, _ = run("show", spec, "--seed", seed)
        assert "random player: " in out and "-0.1" not in out and "'invalid': True" not in out
        episodes.add(tuple(re.findall("random player: .*", out)))
    assert len(episodes) > 4


def test_play_sends_the_typed_responses_to_the_environment(monkeypatch, run):
    typed = iter(["no idea", "<move>5</move>", *(f"<move>{i}</move>" for i in range(1, 10))])
    monkeypatch.setattr(command.CONSOLE, "input", lambda prompt: next(typed))
    code, out, _ = run("play", "tic_tac_toe:opponent=perfect", "--seed", 2)
    assert code == 0 and "reward -0.1" in out and "O takes" in out and "demonstrator" not in out
    assert printed_return(out) <= 0  # the perfect player never loses


def test_self_play_reads_the_responses_of_both_agents(monkeypatch, run):
    typed = iter(f"<move>{cell}</move>" for cell in (1, 4, 2, 5, 3))
    monkeypatch.setattr(command.CONSOLE, "input", lambda prompt: next(typed))
    _, out, _ = run("play", "tic_tac_toe:opponent=self")
    assert "X reward +1" in out and "O reward -1" in out and printed_return(out) == 0


@pytest.mark.parametrize(
    ("args", "culprit"),
    [
        (["dance"], "dance"),
        (["show"], "NAME"),
        (["show", "snaek"], "'snaek'"),
        (["show", "snake:size=99"], "99"),
        (["show", "snake", "--sed", "3"], "--sed"),
        (["show", "snake", "--seed", "x"], "--seed"),
    ],
)
def test_invalid_arguments_exit_with_2_and_name_the_culprit(args, culprit, run):
    code, _, err = run(*args)
    assert code == 2 and culprit in err and "Traceback" not in err


def test_help_exits_with_0(run):
    code, out, _ = run("--help")
    assert code == 0 and "--seed" in out


def test_end_of_input_exits_with_130(monkeypatch, run):
    def end(prompt):
        raise EOFError

    monkeypatch.setattr(command.CONSOLE, "input", end)
    assert run("play", "reverse")[0] == 130


def test_show_without_a_demonstrator_or_random_player_is_an_error():
    with pytest.raises(UsageError, match="no random player"):
        command.run_episode(NoPlayer(), seed=0, interactive=False)


def test_list_contains_an_environment_that_a_script_registered(monkeypatch):
    scripted = type("Scripted", (NoPlayer,), {"__doc__": "From a script.", "__module__": "gone"})
    monkeypatch.setitem(ENVIRONMENTS, "scripted", scripted)
    columns = command.overview().columns
    assert "From a script." in map(str, columns[2].cells)
