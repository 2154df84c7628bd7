from tests.databases import database_url, postgresql_server, postgresql_url, workplace
from tests.scripted_nvml import nvml, nvml_library

__all__ = ["database_url", "nvml", "nvml_library", "postgresql_server", "postgresql_url", "workplace"]
