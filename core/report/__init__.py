"""Reports about runs, made from their logs: README.md, curves.png, report.html, compare.html."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.faults import DISK_ERRORS, Fault
from environments.plumbing.registry import meanings, short_names
from environments.plumbing.text import one_line

PAGES = ("README.md", "curves.png", "report.html")


def write_pages(folder: Path, config: dict[str, Any], names: Sequence[str] = PAGES) -> list[str]:
    """Writes those pages of a run that `names` has; curves.png only after the first update.

    `config` holds the settings of the run, as config.yaml does. Returns a line for each page that
    cannot be made of this log; the others are written. Raises OSError if the disk fails.
    """
    from core.files.run_log import METRICS, read_records
    from core.report.page import write_page
    from core.report.summary import algorithm_title, write_readme

    records = read_records(folder / METRICS)
    failures: list[str] = []
    for name in names:
        try:
            if name == "README.md":
                write_readme(folder, config, records)
            elif name == "report.html":
                write_page(folder / name, [(folder, config)])
            elif any("update" in record for record in records):
                from core.report.curves import draw_curves  # imports matplotlib: a second

                title = f"{algorithm_title(config)} on {short_names(config['env'])}"
                title += f" · {config['model_id']} · seed {config['seed']}"
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about fonts that lack a name's characters
                    draw_curves(folder / name, records, title, meanings(config["env"]))
        except Exception as error:
            if isinstance(error, Fault) or getattr(error, "errno", None) in DISK_ERRORS:
                raise
            reason = f"{type(error).__name__}: {one_line(error)[:200]}"
            failures.append(f"{folder / name} cannot be made: {reason}")
    return failures
