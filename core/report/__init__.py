"""Reports about runs, made from their logs: README.md, curves.png, report.html, comparisons."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

from core.faults import Fault
from environments.plumbing.registry import meanings, short_names
from environments.plumbing.text import one_line


def write_pages(run_dir: Path, config: dict[str, Any]) -> list[str]:
    """Writes README.md, report.html and, after the first update, curves.png of a run.

    `config` holds the settings of the run, as config.yaml does. Returns a line for each page that
    cannot be made of this log; the others are written. Raises OSError if the disk fails.
    """
    from core.files.log import METRICS, read_records
    from core.report import doctor
    from core.report.curves import draw_curves  # imports matplotlib, which takes a second
    from core.report.page import write_page
    from core.report.summary import algorithm_title, write_readme

    records = read_records(run_dir / METRICS)
    envs = short_names(config["env"])
    title = f"{algorithm_title(config)} on {envs} · {config['model_id']}"
    curves = partial(
        draw_curves, run_dir / "curves.png", records, f"{title} · seed {config['seed']}",
        meanings(config["env"], trust=True),
    )  # fmt: skip
    pages = {
        "README.md": partial(
            write_readme, run_dir, config, records, doctor.lines(run_dir, config, records)
        ),
        "curves.png": curves if any("update" in record for record in records) else None,
        "report.html": partial(write_page, run_dir / "report.html", [(run_dir, config)]),
    }
    failed = []
    for name, write in pages.items():
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph")  # a name in a script without a font
                if write:
                    write()
        except (OSError, Fault):
            raise
        except Exception as error:
            failed.append(f"{run_dir / name} cannot be made: {type(error).__name__}: "
                          f"{one_line(error)[:200]}")  # fmt: skip
    return failed
