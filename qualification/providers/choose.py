"""Choose where a run's processes live from what is asked for."""

from __future__ import annotations

from qualification.errors import ConfigurationError
from qualification.providers.protocol import ProcessProvider, Provider


def provider_for(image: str | None, memory_mib: int | None = None) -> Provider:
    """Return containers of ``image`` (by digest), bounded to ``memory_mib``, or plain processes without an image.

    Raises ConfigurationError for an image that is not given by digest, and for a bound without an image.
    """
    if image is None:
        if memory_mib is not None:
            raise ConfigurationError("--memory bounds a container: give --image too")
        return ProcessProvider()
    from qualification.providers.docker import DockerProvider  # the SDK takes a moment to import

    return DockerProvider(image, memory_bytes=memory_mib << 20) if memory_mib else DockerProvider(image)
