"""`python -m core.chat RUN` talks to the model of a run: core/extras/chat.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("core.extras.chat", run_name="__main__", alter_sys=True)
