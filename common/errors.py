"""The errors that mean: change the input or the settings, not the code."""

import os
import sys
from collections.abc import Callable

from absl import app


class UserError(ValueError):
  """Input or settings that cannot be used.

  The message names the file, the record or the flag, the numbers that disagree
  and what to do. Entry points show it as one line, without a traceback.
  """


class DataError(UserError):
  """Input that cannot be used; the message names the file and what to do."""


def run_main(
  main: Callable[[list], None],
  arguments: int | None = 0,
  what: str = "file",
) -> None:
  """absl's app.run, but an expected error is one clear last line on stderr.

  Any other error keeps its traceback: it is a bug, and the traceback says
  where.

  Args:
    main: gets the program's name and what is left of the command line.
    arguments: how many words that are no flags the command takes; None: any
      number from 1 on.
    what: these arguments are.
  """

  def wrapped(argv):
    try:
      if arguments is None and len(argv) == 1:
        raise UserError(f"no {what} is given; see --help")
      if arguments is not None and len(argv) - 1 != arguments:
        raise UserError(
          f"{len(argv) - 1} arguments that are no flags ({' '.join(argv[1:4])}"
          f"), not {arguments}; is a glob unquoted? See --help"
        )
      main(argv)
    except (UserError, OSError) as e:
      program = os.path.basename(argv[0])
      print(f"{program}: error: {e}", file=sys.stderr, flush=True)
      sys.exit(1)

  app.run(wrapped)
