"""The grid of packed sizes. Kernels tune once per size, so a trainer must not feed them ever-new ones."""

from __future__ import annotations

from trainer_rank.errors import InvalidInputError

STEPS_PER_OCTAVE = 4
"""Grid sizes between a power of two and the next; at most 1 / STEPS_PER_OCTAVE of a batch is padding."""
SMALLEST = 256
"""The smallest packed size, in tokens."""


def padded_tokens(tokens: int, context: int = 1) -> int:
    """The smallest grid size of at least ``tokens`` packed tokens, divisible among ``context`` ranks.

    Raises:
        InvalidInputError: no tokens.
    """
    if tokens < 1:
        raise InvalidInputError(f"a packed batch of {tokens} tokens: give at least one")
    floor = SMALLEST * context
    if tokens <= floor:
        return floor
    step = max(floor, (1 << (tokens - 1).bit_length() - 1) // STEPS_PER_OCTAVE)
    return -(-tokens // step) * step


def grid_sizes(smallest: int, largest: int, context: int = 1) -> tuple[int, ...]:
    """Every grid size from that of ``smallest`` to that of ``largest`` tokens, ascending."""
    sizes = [padded_tokens(smallest, context)]
    while sizes[-1] < largest:
        sizes.append(padded_tokens(sizes[-1] + 1, context))
    return tuple(sizes)
