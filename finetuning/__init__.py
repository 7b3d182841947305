import common as common  # first: it names a missing environment
