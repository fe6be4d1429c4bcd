"""Reports about runs, made from their logs: README.md, curves.png, report.html, comparisons."""

from pathlib import Path
from typing import Any


def write_pages(run_dir: Path, config: dict[str, Any]) -> None:
    """Writes README.md, report.html and, after the first update, curves.png of a run.

    `config` holds the settings of the run, as config.yaml does.
    """
    from core.report.curves import draw_curves  # imports matplotlib, which takes a second
    from core.report.page import write_report
    from core.report.summary import write_readme
    from core.run_log import METRICS, read_metrics

    records = read_metrics(run_dir / METRICS)
    write_readme(run_dir, config, records)
    if any("update" in record for record in records):
        title = f"{config['algo']} on {' '.join(config['env'])} · {config['model_id']}"
        draw_curves(run_dir / "curves.png", records, f"{title} · seed {config['seed']}")
    write_report(run_dir, config)
