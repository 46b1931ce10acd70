"""Property tests repeat the same examples each run, and are not timed: the machine is shared."""

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")
