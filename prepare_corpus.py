"""For one release: now it is `python -m tools.prepare_corpus`."""

import runpy

runpy.run_module("tools.prepare_corpus", run_name="__main__", alter_sys=True)
