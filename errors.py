"""The error that means: change the input or the settings, not the code."""


class UserError(ValueError):
  """Input or settings that cannot be used.

  The message names the file, the record or the flag, the numbers that disagree
  and what to do. Entry points show it as one line, without a traceback.
  """
