"""For one release: now it is `python -m tools.quickstart`."""

import runpy

runpy.run_module("tools.quickstart", run_name="__main__", alter_sys=True)
