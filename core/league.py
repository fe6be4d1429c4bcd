"""`python -m core.league ENV PLAYERS` plays a tournament: core/extras/league.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("core.extras.league", run_name="__main__", alter_sys=True)
