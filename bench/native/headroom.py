"""Record the step under pressure that docs/headroom.md shows, on a GPU: ``python -m bench.native.headroom OUTPUT.gz``.

A raw driver allocation narrows the card behind an ordinary step; the backward's library is a real cuBLAS handle with
67,108,864 B of driver memory beside it. ``python -m bench.headroom PICTURE.png OUTPUT.gz`` draws it. Takes under 40 s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.headroom import Scene, record_step
from bench.native.batches import ragged
from bench.native.release import LIBRARY_BYTES, Ground, real
from trainer_rank.allocator.trace import save_trace

TOKENS, SPARE = 8_192, 128 << 20


def scene(ground: Ground, tokens: int = TOKENS) -> tuple[Scene, Callable[[], None]]:
    """The scene on the ground's device, and what gives its driver memory back."""
    device, driver, held, ballast = ground.device, ground.driver, ExitStack(), ExitStack()

    def meet() -> None:
        held.callback(driver.destroy, driver.handle())
        held.callback(driver.give_back, driver.take(LIBRARY_BYTES, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))

    def narrow(needed: int) -> int:
        room = needed + SPARE
        device.empty_cache()
        before = device.memory_info().free
        ballast.callback(driver.give_back, driver.take(before - room, "no ballast"))
        return before - device.memory_info().free

    def close() -> None:
        held.close()
        ballast.close()

    made = Scene(device, ground.model(), ragged(tokens, 1, smallest=8), meet, held.close, narrow)
    return made, close


def main(output: Path) -> None:
    """Record and save."""
    made, close = scene(real())
    trace = record_step(made)
    save_trace(trace, output)
    close()
    print(f"{output}: {len(trace.events)} events, card of {trace.features['capacity']:,} B")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
