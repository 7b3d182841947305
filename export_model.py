"""For one release: now it is `convert_checkpoint.py --to=saved_model`."""

from absl import flags

import convert_checkpoint
from common import errors

if __name__ == "__main__":
  convert_checkpoint.define_flags()
  flags.adopt_module_key_flags(convert_checkpoint)  # so that --help shows them
  flags.FLAGS.set_gnu_getopt()  # flags may follow MODEL
  flags.FLAGS.set_default("to", convert_checkpoint.SAVED_MODEL)
  flags.DEFINE_alias("output_dir", "output")
  errors.run_main(convert_checkpoint.main, arguments=1)
