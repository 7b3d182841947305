"""For one release: now it is `convert_checkpoint.py --to=saved_model`.

python export_model.py runs/first --output_dir=runs/first/served/1
"""

from absl import flags

import convert_checkpoint
from common import errors, settings

if __name__ == "__main__":
  settings.define_flags(convert_checkpoint.Settings)
  flags.FLAGS.set_gnu_getopt()  # flags may follow MODEL
  flags.FLAGS.set_default("to", convert_checkpoint.SAVED_MODEL)
  flags.DEFINE_alias("output_dir", "output")
  errors.run_main(
    lambda argv: convert_checkpoint.main(
      settings.from_flags(convert_checkpoint.Settings, flags.FLAGS), *argv[1:]
    ),
    arguments=1,
  )
