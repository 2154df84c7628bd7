from __future__ import annotations

import pytest

from trainer_rank.allocator.driver import ModelledDriver
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.outofmemory import OutOfMemory, format_size
from trainer_rank.allocator.rules import GIB, MIB


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"), (1024, "1024 bytes"), (1025, "1.00 KiB"), (MIB, "1024.00 KiB"), (MIB + 1, "1.00 MiB"),
        (GIB, "1024.00 MiB"), (GIB + 1, "1.00 GiB"), (150121021440, "139.81 GiB"), (255422627, "243.59 MiB"),
    ],
)  # fmt: skip
def test_sizes_are_spelled_as_pytorch_spells_them(size: int, text: str) -> None:
    assert format_size(size) == text


def test_the_message_gives_pytorchs_figures() -> None:
    """The wording of a public PyTorch 2.x report, with figures of our own."""
    model = CachingAllocator(ModelledDriver(8 * GIB, outside=512 * MIB))
    model.malloc(5 * GIB)
    model.free(model.malloc(6 * MIB))
    model.malloc(6 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        model.malloc(3 * GIB)
    error = caught.value
    assert (error.asked, error.total, error.free) == (3 * GIB, 8 * GIB, 8 * GIB - 512 * MIB - 5 * GIB - 20 * MIB)
    assert (error.process, error.allocated) == (5 * GIB + 532 * MIB, 5 * GIB + 6 * MIB)
    assert (error.reserved, error.unallocated, error.allowed) == (5 * GIB + 20 * MIB, 14 * MIB, None)
    assert str(error) == (
        "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 2.48 GiB is "
        "free. Including non-PyTorch memory, this process has 5.52 GiB memory in use. Of the allocated memory 5.01 GiB "
        "is allocated by PyTorch, and 14.00 MiB is reserved by PyTorch but unallocated."
    )


def test_with_a_cap_the_message_says_what_is_allowed() -> None:
    """As measured with a memory fraction of 0.1: the cache goes first, then the error names what is allowed."""
    total = 150109880320
    cap = int(0.1 * total)
    model = CachingAllocator(ModelledDriver(total, outside=649_000_000), cap=cap)
    for handle in [model.malloc(GIB) for _ in range(6)]:
        model.free(handle)
    model.malloc(25 * GIB // 2)
    assert (model.num_alloc_retries, model.num_ooms) == (1, 0)
    with pytest.raises(OutOfMemory, match=r"13\.98 GiB allowed; Of the allocated memory 12\.50 GiB"):
        model.malloc(2 * GIB)
