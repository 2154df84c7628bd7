"""torchrun as the supervisor starts it: PyTorch's own, ending with the exit code of the rank that failed first.

``python -m qualification.execution.torchrun`` takes torchrun's arguments. PyTorch comes from the environment of the
subject, as it does for the ranks.
"""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """Run torchrun to its end. A rank ended by a signal counts as 128 and the signal's number, as in a shell."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(f"torchrun: rank {rank} failed first, with exit code {failure.exitcode}\n")
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
