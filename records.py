"""For one release: now it is `python -m tools.inspect_records`."""

import runpy

runpy.run_module("tools.inspect_records", run_name="__main__", alter_sys=True)
