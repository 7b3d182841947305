"""For one release: now it is `python -m tools.plot_metrics`."""

import runpy

runpy.run_module("tools.plot_metrics", run_name="__main__", alter_sys=True)
