from tests.docker_engine import docker_engine
from tests.flows.conftest import permit, private
from tests.scripted_nvml import nvml, nvml_library

__all__ = ["docker_engine", "nvml", "nvml_library", "permit", "private"]
