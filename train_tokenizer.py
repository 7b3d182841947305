"""For one release: now it is `python -m tools.train_tokenizer`."""

import runpy

runpy.run_module("tools.train_tokenizer", run_name="__main__", alter_sys=True)
