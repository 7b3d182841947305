"""What all layers use: TensorFlow in 1.x mode, errors, files, settings."""

import sys

from common import environment

# Python's own line would name one package, and no remedy.
sys.excepthook = environment.explain
