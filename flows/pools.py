"""What a flow in a container of a docker work pool cannot do: it has no engine, and no GPU was leased for it."""

from __future__ import annotations

from flows.request import Request
from qualification.errors import ConfigurationError
from qualification.records import Ground

VARIABLE = "QUALIFY_WORK_POOL"
"""Set by the deployments of prefect.yaml for flows that run in containers, to the type of their pool."""

DOCKER = "docker"


def require_possible(request: Request, pool: str | None) -> None:
    """Raise ConfigurationError for a request that a pool of type ``pool`` cannot meet. None: any other pool, or none.

    A container gets its devices when it is made, and a device is leased before anything that may touch it exists. So
    containers with GPUs are started by a flow outside, from a lease, with ``image``.
    """
    if pool != DOCKER:
        return
    instead = "use a deployment of the process pool"
    if request.ground is Ground.NATIVE:
        raise ConfigurationError(
            f"parameter ground 'native': a flow in a docker pool has no leased GPU; {instead}, and image"
        )
    if request.image is not None:
        raise ConfigurationError(
            f"parameter image {request.image!r}: a flow in a docker pool has no engine to start it with; {instead}"
        )
