"""Reports about runs, made from their logs: README.md, curves.png, report.html, comparisons."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core.faults import Fault
from environments.plumbing.registry import meanings, short_names
from environments.plumbing.text import one_line

PAGES = ("README.md", "curves.png", "report.html")


def write_pages(folder: Path, config: dict[str, Any], names: Sequence[str] = PAGES) -> list[str]:
    """Writes README.md, report.html and, after the first update, curves.png of a run; or those of
    `names` alone.

    `config` holds the settings of the run, as config.yaml does. Returns a line for each page that
    cannot be made of this log; the others are written. Raises OSError if the disk fails.
    """
    from core.files.run_log import METRICS, read_records
    from core.report.page import write_page
    from core.report.summary import algorithm_title, write_readme

    records = read_records(folder / METRICS)

    def curves() -> None:
        if not any("update" in record for record in records):
            return
        from core.report.curves import draw_curves  # imports matplotlib, which takes a second

        envs = short_names(config["env"])
        title = f"{algorithm_title(config)} on {envs} · {config['model_id']}"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a name in a script without a font
            draw_curves(
                folder / "curves.png", records, f"{title} · seed {config['seed']}",
                meanings(config["env"]),
            )  # fmt: skip

    pages: dict[str, Callable[[], object]] = {
        "README.md": lambda: write_readme(folder, config, records),
        "curves.png": curves,
        "report.html": lambda: write_page(folder / "report.html", [(folder, config)]),
    }
    failed = []
    for name in names:
        try:
            pages[name]()
        except (OSError, Fault):
            raise
        except Exception as error:
            failed.append(f"{folder / name} cannot be made: {type(error).__name__}: "
                          f"{one_line(error)[:200]}")  # fmt: skip
    return failed
