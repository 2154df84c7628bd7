"""Write docs/native.md anew from the committed recordings: ``python -m bench.native``."""

from bench.native.report import PAGE, page

PAGE.write_text(page())
