"""workshop.ipynb runs top to bottom, holds no output, and copies none of the project's code."""

import ast
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = json.loads((ROOT / "workshop.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def trees():
    """Each code cell as Python; lines for IPython alone (%matplotlib) left out."""
    for cell in CODE:
        yield ast.parse("".join(line for line in cell["source"] if not line.startswith("%")))


def defined(tree):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_no_output_is_committed():
    assert len(NOTEBOOK["cells"]) <= 45
    assert [cell["outputs"] for cell in CODE] == [[]] * len(CODE)
    assert {cell["execution_count"] for cell in CODE} == {None}
    assert NOTEBOOK["metadata"]["kernelspec"]["name"] == "python3"


def test_no_function_of_the_project_is_written_again():
    files = [*ROOT.glob("algorithms/*.py"), *ROOT.glob("core/*.py"), ROOT / "scratch.py"]
    ours = set().union(*(defined(ast.parse(file.read_text())) for file in files))
    assert {"token_logprobs", "gae", "training_step"} <= ours
    assert not ours & set().union(*map(defined, trees()))


def test_every_import_resolves():
    kinds = (ast.Import, ast.ImportFrom)
    found = [node for tree in trees() for node in ast.walk(tree) if isinstance(node, kinds)]
    assert len(found) > 10
    for node in found:
        exec(compile(ast.Module([node], []), "workshop.ipynb", "exec"), {})


def test_all_exercises_are_walked_through_in_order():
    from core.workshop.exercises import EXERCISES

    code = "".join(line for cell in CODE for line in cell["source"])
    places = [code.find(f"solutions.{exercise.name}(") for exercise in EXERCISES]
    assert -1 not in places and places == sorted(places)


@pytest.mark.slow
def test_notebook_runs_top_to_bottom(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the last cell would fetch a model
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the copy, before anything installed
    before = sorted(os.listdir(ROOT / "runs"))
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    notebook = nbformat.read(tmp_path / "workshop.ipynb", as_version=4)
    nbformat.validate(notebook)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 10
    assert outputs[-1].text.startswith("Skipped")
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert (tmp_path / "runs/notebook-grpo-1/metrics.jsonl").exists()
    assert sorted(os.listdir(ROOT / "runs")) == before
