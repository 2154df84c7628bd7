from tests.flows.conftest import permit, private

__all__ = ["permit", "private"]
