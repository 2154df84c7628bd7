"""Every kind of tampering that must be found."""

from tests.tamper import envelopes, rows, storage
from tests.tamper.kinds import CORPUS, Kind

__all__ = ["CORPUS", "Kind", "envelopes", "rows", "storage"]
