"""Fine-tuning: tasks, their data and metrics, and the run that they share."""

import common as common  # first: it names a missing environment
