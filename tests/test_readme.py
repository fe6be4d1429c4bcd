"""The READMEs: every command runs, every link exists, every metric and recorded result is right."""

import io
import re
import runpy
import shlex
from dataclasses import fields
from pathlib import Path
from statistics import median

import pytest

from core import config, settings
from core.extras import chat
from core.files.run_log import read_records
from core.results import accuracy_of, before_after

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
(PARITY,) = re.findall(r"```python\n([^`]*class Parity.*?)```", README, re.DOTALL)
PAGES = sorted(
    page.relative_to(ROOT).as_posix() for pattern in ("*.md", "[!.]*/*.md", "[!.]*/*/*.md")
    for page in ROOT.glob(pattern) if not (page.parent / "config.yaml").exists()  # of no run
)  # fmt: skip
SMALL = """--sft-steps 2 --sft-batch-size 2 --num-updates 1 --num-prompts 2 --group-size 2
    --eval-num-tasks 2 --max-tokens 8 --max-turns 1 --kl-coef 0.1 --device cpu""".split()


def commands_of(page, program):
    """The arguments of each indented `program` line of a page, without its comment."""
    lines = re.findall(rf"^ +{program}(.*?)(?:  +#.*)?$", (ROOT / page).read_text(), re.M)
    return [line.strip() for line in lines]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_works_in_powershell(page):
    """It expands no pattern, reads a,b as two words, sets no variable before a command, continues
    no line after a backslash, and in Windows has no &&. A POSIX shell runs the YAML of a page.
    """
    programs = r"(?:[A-Z_]+=\S* )*(?:python|pip|uv|torchrun|git|ruff|mypy|pytest)"
    text = re.sub("^```yaml.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for line in re.findall(rf"^ +{programs} .*|(?<=`){programs} [^`]*(?=`)", text, re.M):
        bare = re.sub('"[^"]*"', "", line.partition(" #")[0])
        assert not re.search(r"[,*&'$`\\]|^ *[A-Z_]+=", bare), line


COMMANDS = commands_of("README.md", r"python train\.py")
OF_ALL_PAGES = {
    flags for page in PAGES for flags in commands_of(page, r"(?:python|torchrun [-\w ]+) train\.py")
}


@pytest.mark.parametrize("flags", [
    flags for flags in COMMANDS if "<name>" not in flags and flags != "--help"  # test_cli.py
])  # fmt: skip
def test_every_train_command_of_the_readme_runs_and_its_metrics_have_a_meaning(
    command, qwen3_folder, flags
):
    Path("parity.py").write_text(PARITY)
    flags = flags.replace("Qwen/Qwen3-4B-Instruct-2507", str(qwen3_folder))
    if "smollm2" in flags:
        flags = f"{flags.replace('runs/', f'{ROOT}/runs/')} --model-id {qwen3_folder}"
    if "--model-id" in flags:
        flags += " --max-model-len 500 --train-difficulty 1"
    code, _, err = command(*shlex.split(flags), *SMALL)
    assert code == 0, err
    text = (ROOT / "core/README.md").read_text().split("## What every metric means")[1]
    table = set(re.findall(r"`([a-z]+(?:/[<>\w]+)*)`", text))
    for file in Path("runs").glob("*/metrics.jsonl"):
        names = {key for record in read_records(file) for key in record} - {"update", "sft_step"}
        names = {re.sub("^(info|example)/.*", r"\1/<key>", name) for name in names}
        names = {re.sub(r"eval/[^/]+/", "eval/<env>/", name) for name in names}
        assert names <= table, names - table


def test_the_commands_of_the_readme_for_a_run_go_on_with_it(command, capsys, monkeypatch):
    """In the order of the page: it is resumed, and answers."""
    assert command(*SMALL, "--model-id", "tiny-random", "--run-name", "a")[0] == 0
    [resume] = [flags.replace("<name>", "a") for flags in COMMANDS if "<name>" in flags]
    assert command(*shlex.split(resume), "--num-updates", "2")[0] == 0
    assert read_records(Path("runs/a/metrics.jsonl"))[-1]["update"] == 2
    commands = commands_of("README.md", r"python -m core\.chat")
    assert commands
    for flags in commands:
        monkeypatch.setattr("sys.stdin", io.StringIO('How many r in "cherry"?'))
        assert chat.execute(shlex.split(flags.replace("<name>", "a"))) == 0, flags
        assert capsys.readouterr().out


@pytest.mark.parametrize("flags", [
    flags for flags in sorted(OF_ALL_PAGES - {*COMMANDS})
    # tests/test_own_algorithm.py runs best.py
    if not any(part in flags for part in ("<name>", "--help", "--algo best.py"))
])  # fmt: skip
def test_every_train_command_has_valid_settings(monkeypatch, flags):
    monkeypatch.setattr(config, "is_installed", lambda package: True)
    config.validate(config.resolve(settings.parse(shlex.split(flags))))


def test_the_environment_commands_of_the_readme_run(capsys, monkeypatch, tmp_path):
    from environments.__main__ import execute

    monkeypatch.chdir(tmp_path)
    assert PARITY in (ROOT / "environments/README.md").read_text()
    Path("parity.py").write_text(PARITY)
    for flags in commands_of("README.md", r"python -m environments"):
        if "play" in flags:
            monkeypatch.setattr("builtins.input", lambda *_: "5")
        assert execute(shlex.split(flags)) == 0, flags
        assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES)
def test_every_linked_file_and_named_script_exists(page):
    text, folder = (ROOT / page).read_text(), (ROOT / page).parent
    links = [link for link in re.findall(r"\]\(([^)#]*)[^)]*\)", text) if "://" not in link]
    assert all((folder / link).exists() for link in links if link), links
    for script in re.findall(r"^ +python ([\w/.]+\.py)", text, re.MULTILINE):
        written = script == "drill.py"  # by python -m core.workshop.drill
        assert written or (ROOT / script).exists(), script
    for module in re.findall(r"python -m ((?:core|environments)[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), module


RESULTS = re.findall(r"^\| .*, seeds ([\d, ]+) \| (.+) \| (.+) \| ([\d.]+) \|$", README, re.M)


def test_results_are_those_of_the_recorded_runs():
    tiny, smollm2 = RESULTS
    for seed in tiny[0].split(", "):
        file = ROOT / f"runs/letter_counting_tiny/grpo-seed{seed}.jsonl"
        ((env, first, last),) = before_after(read_records(file))
        trivial = f"{last[f'eval/{env}/trivial']:.2f}"
        assert tiny[1:] == (accuracy_of(env, first), accuracy_of(env, last), trivial)
    accuracies = []
    for seed in smollm2[0].split(", "):
        records = read_records(ROOT / f"runs/smollm2/sums-seed{seed}.jsonl")
        ((env, first, last),) = before_after(records)
        assert smollm2[1] == accuracy_of(env, first)
        assert smollm2[3] == f"{last[f'eval/{env}/trivial']:.2f}"
        accuracies.append(last[f"eval/{env}/accuracy"])
    low, middle, high = min(accuracies), median(accuracies), max(accuracies)
    assert smollm2[2] == f"{low:.2f} to {high:.2f}, median {middle:.2f}"


def test_the_diffs_of_the_algorithms_are_those_of_their_files():
    page = (ROOT / "algorithms/README.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "runs/diffs.py"))["with_diffs"](page) == page
    assert page.count("```diff") == 6


def test_the_python_example_trains(command, monkeypatch):
    monkeypatch.syspath_prepend(Path.cwd())
    Path("parity.py").write_text(PARITY)
    code = re.findall(r"```python\n(import train\n[^`]*)```", README)[0]
    small = re.sub(r"=\d+", "=1", code)
    exec(small.replace("Config(", "Config(eval_num_tasks=2, max_tokens=8, group_size=2, "), {})
    (folder,) = Path("runs").iterdir()
    assert [record.get("update") for record in read_records(folder / "metrics.jsonl")][-1] == 1


def test_the_ten_settings_that_matter_are_those_of_the_first_box_of_help():
    sentence = re.findall(r"^The ten settings(.*?)\.\s", README, re.M | re.S)[0]
    named = re.findall(r"`--([\w-]+)`", sentence.partition("`--help`")[2])
    assert named == [f.name.replace("_", "-") for f in fields(config.MainOptions)]
