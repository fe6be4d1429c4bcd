"""workshop.ipynb runs top to bottom; it is stored without outputs, so that none gets old."""

import json
import os
from pathlib import Path

import pytest

from core.workshop.exercises import EXERCISES

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "workshop.ipynb"


def test_notebook_has_no_outputs_and_calls_every_solution_in_order():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    text = "".join(line for cell in code for line in cell["source"])
    places = [text.find(f"solutions.{exercise.name}(") for exercise in EXERCISES]
    assert -1 not in places and places == sorted(places)


@pytest.mark.slow
def test_notebook_runs_top_to_bottom(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the last cell would download a model
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs[-1].text.startswith("Skipped")
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert (tmp_path / "runs/notebook-grpo-1/metrics.jsonl").exists()
