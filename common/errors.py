"""How programs end: by errors that the user can mend, or as they are asked."""

import os
import signal
import sys
from collections.abc import Callable

from absl import app

from common.console import tell

# Exit status of a run that a signal stopped, after it saved (EX_TEMPFAIL).
STOPPED_STATUS = 75
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class UserError(ValueError):
  """Input or settings that cannot be used.

  The message names the file, the record or the flag, the numbers that disagree
  and what to do. Entry points show it as one line, without a traceback.
  """


class DataError(UserError):
  """Input that cannot be used."""


def leave_when_asked() -> None:
  """From now on a signal ends the program: for when nothing is to be saved."""
  for number in STOP_SIGNALS:
    signal.signal(number, _leave)


def _leave(number, _) -> None:
  for other in STOP_SIGNALS:  # a second one ends at once
    signal.signal(other, signal.SIG_DFL)
  name = signal.Signals(number).name
  tell(f"{name}: stopped as asked: the same command resumes")
  sys.exit(STOPPED_STATUS)


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
