"""Settings for every test, and the fixtures of which one per session is enough, whichever packages use them."""

from hypothesis import settings

from tests.docker_engine import docker_engine
from tests.scripted_nvml import nvml, nvml_library

__all__ = ["docker_engine", "nvml", "nvml_library"]

# property tests have no deadline, because a busy machine is no fault of the code
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
