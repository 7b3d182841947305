"""The errors that mean: change the input or the settings, not the code."""

import os
import sys
from collections.abc import Callable

from absl import app

from common.console import tell


class UserError(ValueError):
  """Input or settings that cannot be used.

  The message names the file, the record or the flag, the numbers that disagree
  and what to do. Entry points show it as one line, without a traceback.
  """


class DataError(UserError):
  """Input that cannot be used."""


def run_main(main: Callable[[list], None], arguments: int | None = 0) -> None:
  """absl's app.run, but an expected error is one line on stderr, and status 1.

  `main` gets argv: the program, then `arguments` words; None: at least one, -1:
  any number.
  """

  def wrapped(argv):
    words = argv[1:]
    try:
      if arguments is None and not words:
        raise UserError("no file is given; see --help")
      if arguments not in (None, -1, len(words)):
        raise UserError(
          f"{len(words)} arguments that are no flags ({' '.join(words[:3])}), "
          f"not {arguments}; is a glob unquoted? See --help"
        )
      main(argv)
    except (UserError, OSError) as e:
      program = os.path.basename(argv[0])
      tell(f"{program}: error: {e}")
      sys.exit(1)

  app.run(wrapped)
