"""No text of others acts on the terminal, and each page of a run is written on its own."""

import random

import pytest

from core import config, report, run_dir
from core.report import curves
from runs.faults import terminal


def test_no_text_of_others_acts_on_the_terminal():
    found = {name: check() for name, check in terminal.cases(random.Random(0))}
    assert len(found) > 150 and not {name: line for name, line in found.items() if line}
    assert terminal._judge(lambda text: text, "\x1b[2J")  # the cases can fail
    assert terminal._judge(lambda text: "", "[/x]")


@pytest.mark.parametrize("name", ["$\\frac{", "_a" + "x" * 3000])
def test_any_name_can_stand_in_the_curves(tmp_path, name):
    metrics = {"reward/mean": 0.5, f"info/{name}": 0.5, "warnings": {name: name}}
    accuracy = {f"eval/{name}/{key}": 0.5 for key in ("accuracy", "ci_low", "ci_high")}
    records = [{"update": update, **metrics, **accuracy} for update in range(2)]
    curves.draw_curves(tmp_path / "curves.png", records, name)
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_page_that_cannot_be_made_costs_itself_and_one_line(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"update": 0}\n')
    settings = run_dir.config_to_dict(config.resolve(config.Config()))

    def fail(*_):
        raise ValueError("no glyph\n\x1b[2J")

    def fill_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(curves, "draw_curves", fail)
    lines = report.write_pages(tmp_path, settings)
    name = tmp_path / "curves.png"
    assert lines == [f"{name} cannot be made: ValueError: no glyph [2J"]
    assert (tmp_path / "README.md").exists() and (tmp_path / "report.html").exists()
    monkeypatch.setattr(curves, "draw_curves", fill_disk)  # ends the run, as it should
    with pytest.raises(OSError, match="No space"):
        report.write_pages(tmp_path, settings)
