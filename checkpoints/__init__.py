"""A run's files: its description, its states, its metrics."""

import common as common  # first: it names a missing environment
