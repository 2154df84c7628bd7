from tests.flows.conftest import private

__all__ = ["private"]
