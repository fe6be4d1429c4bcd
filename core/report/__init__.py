"""Programs that read finished or running runs: comparison, page, curves, token traces."""
