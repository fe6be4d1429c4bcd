"""`python -m core.serve RUN` answers requests in OpenAI's API: core/extras/serve.py."""

import runpy

from core.terminal import cli

if __name__ == "__main__":
    cli.say_loading()
    runpy.run_module("core.extras.serve", run_name="__main__", alter_sys=True)
