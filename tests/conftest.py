"""Settings for every test: property tests have no deadline, because a busy machine is no fault of the code."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
