"""workshop.ipynb runs top to bottom, and is committed with its outputs and pictures."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from core.workshop.exercises import EXERCISES

ROOT = Path(__file__).parent.parent
NOTEBOOK = json.loads((ROOT / "workshop.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_notebook_has_the_outputs_of_one_run_and_calls_every_solution_in_order():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 6
    assert "error" not in {output["output_type"] for output in outputs}
    code = "".join(line for cell in CODE for line in cell["source"])
    places = [code.find(f"solutions.{exercise.name}(") for exercise in EXERCISES]
    assert -1 not in places and places == sorted(places)


@pytest.mark.slow
def test_notebook_runs_top_to_bottom(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the last cell would download a model
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # import the copy
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    for name in filter(lambda name: (ROOT / name).exists(), tracked.splitlines()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    notebook = nbformat.read(tmp_path / "workshop.ipynb", as_version=4)
    nbformat.validate(notebook)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 6
    assert outputs[-1].text.startswith("Skipped")
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert (tmp_path / "runs/notebook-grpo-1/metrics.jsonl").exists()
