"""An algorithm in a file of the user's: it trains, logs, warns, reports and resumes."""

from pathlib import Path

import pytest
import yaml
from conftest import metrics_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "algorithms/README.md").read_text(encoding="utf-8")
MINE = README.partition("```python\n")[2].partition("```")[0]
LAST = "return advantages[turns.of_token]  # [S]: of each sampled token"
WITH_METRIC = """return {"advantages": advantages[turns.of_token], "mine/best": advantages.mean()}


def compute_loss(*of_grpo):
    loss, sums = grpo.compute_loss(*of_grpo)
    return loss, sums | {"mine/tokens": of_grpo[0].in_loss.sum()}"""
OWN = MINE + "\n\ndef compute_loss(tokens, options):\n    return tokens.logprobs.sum()"
SHORT = "--num-prompts 2 --group-size 4 --max-tokens 8 --eval-num-tasks 2".split()


def test_the_example_of_the_readme_trains_logs_reports_and_resumes(command):
    text = MINE.replace(LAST, WITH_METRIC).replace(
        "import torch", "import torch\nfrom algorithms import grpo"
    )
    text = text.replace("@dataclass(frozen=True)\n", "")  # it may be missing
    Path("mine.py").write_text(text)
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
        assert 0 <= record["mine/best"] <= 1 == record["mine/tokens"]  # a mean over tokens
    Path("mine.py").write_text(f"{text}\n# edited")
    code, out, _ = command("--resume", "runs/a", "--algo", "mine.py", "--mine.clip-high", "0.3")
    assert code == 0 and "mine.clip_high 0.28 -> 0.3, code of mine.py" in out


@pytest.mark.parametrize(("text", "named"), [
    (MINE.replace("import compute_loss", "import Options as Other"), "it has no compute_loss"),
    ("import nonsense_module\n", "'nonsense_module' (mine.py, line 1)"),
    (MINE.replace("class Options", "class Others"), "has no Options; `from algorithms.options"),
    (MINE.replace('{"groups", ', '{"group", '), "needs 'group': choose groups, value_head, "),
    (MINE.replace("[turns.of_token]", "[:, None]"), "advantages has the shape [8, 1], not ["),
    (MINE.replace("return advantages[turns.of_token]",
                  "a = advantages[turns.of_token]; return dict(advantages=a, in_loss=a)"),
     "in_loss is a vector of the loop"),
    (MINE.replace("clip_low:", "aggregation: str = 'x'; clip_low:"), "aggregation 'x': choose t"),
    (OWN, "compute_loss: return ("), (OWN + ", {'p': tokens.logprobs}", "metric p is no"),
], ids=range(9))  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_line(command, text, named):
    Path("mine.py").write_text(text)
    code, _, err = command(*SHORT, "--algo", "mine.py", "--num-updates", "1")
    assert code == 2 and err.count("\n") == 1 and err.startswith("train.py: ") and named in err
