"""An algorithm in a file of the user's: it trains, logs, warns, reports and resumes."""

from pathlib import Path

import pytest
import yaml
from conftest import metrics_of

from core.algorithm import algorithm_names, load_algorithm

ROOT = Path(__file__).parent.parent
README = (ROOT / "algorithms/README.md").read_text(encoding="utf-8")
MINE = README.partition("```python\n")[2].partition("```")[0]
LAST = "return torch.where(batch.completion_mask, (returns == best).float(), 0.0)"
WITH_METRIC = """advantages = torch.where(batch.completion_mask, (returns == best).float(), 0.0)
    return {"advantages": advantages, "mine/best": best.mean().item()}"""
SHORT = "--num-prompts 2 --group-size 4 --max-tokens 8 --eval-num-tasks 2".split()


def test_the_example_of_the_readme_trains_logs_reports_and_resumes(command):
    assert LAST in MINE
    Path("mine.py").write_text(MINE.replace(LAST, WITH_METRIC))
    algo = ["--algo", "mine.py", "--mine.clip-high", "0.28"]
    code, out, err = command(*SHORT, *algo, "--num-updates", "1", "--run-name", "a")
    assert code == 0 and "picoRL · mine · letter_counting" in out and "clip_high=0.28" in out, err
    saved = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    assert saved["mine"]["clip_high"] == 0.28 and saved["algo"] == str(Path("mine.py").absolute())
    assert '"algo":"mine"' in Path("runs/a/report.html").read_text(encoding="utf-8")

    Path("mine.py").unlink()  # the run has a copy
    assert command("--resume", "runs/a", "--num-updates", "2")[0] == 0
    _, *updates = metrics_of("runs/a")
    for record in updates:
        assert record["update/steps"] == 1 and record["grad/norm"] > 0
        assert 0 <= record["mine/best"] <= 1
    code, _, err = command("--resume", "runs/a", "--mine.clip-high", "0.3")
    assert code == 2 and "mine.clip_high is 0.28 in this run, not 0.3" in err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (MINE.replace("import compute_loss", "import Options as Other"), "it has no compute_loss"),
        ("import nonsense_module\n", "ModuleNotFoundError: No module named 'nonsense_module' "
                                     "(mine.py, line 1)"),
        (MINE.replace("@dataclass(frozen=True)\n", ""), "Options must be a dataclass"),
        (MINE.replace('{"groups", ', '{"group", '), "needs 'group': choose groups, value_head, "),
    ],
    ids=range(4),
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_line(command, text, named):
    Path("mine.py").write_text(text)
    code, out, err = command("--algo", "mine.py")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("train.py: --algo ") and named in err


def test_every_algorithm_of_the_folder_is_found_and_explains_itself():
    assert {"reinforce", "grpo", "ppo", "gspo", "cispo", "scratch"} <= set(algorithm_names())
    for name in algorithm_names():
        assert load_algorithm(name).Options.__doc__ and load_algorithm(name).__doc__
