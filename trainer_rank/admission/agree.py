"""Agree with the other ranks on one plan: two small all-gathers per decision, and nobody waits for the dead.

A rank that cannot plan says so in its row. One that dies breaks its connections: whoever notices writes the reason into
the store, where everybody who waits looks every few milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer_rank.admission.decide import Outcome
from trainer_rank.admission.planner import Choice
from trainer_rank.admission.vote import Proposal, Vote, admitted, proposed, vote_of
from trainer_rank.errors import PlanningError

_LOOK_SECONDS = 0.05
_FAILED = "failed"


class _PeerError(PlanningError):
    """A failure of another rank, which has told all of them."""


class Agreement:
    """Makes one decision with all ranks of ``group`` (Gloo); ``store`` is the one that the group was made with.

    ``patience`` bounds the wait for a rank that is alive but does not come, in seconds.
    """

    def __init__(self, store: Store, group: distributed.ProcessGroup | None = None, patience: float = 600.0) -> None:
        self.group = group
        self._store = PrefixStore("admission", store)
        self._patience = patience
        self.rank = distributed.get_rank(group)
        self.collectives = 0
        self._abandoned = False

    def decide(
        self, propose: Callable[[], Choice], review: Callable[[Proposal], Choice], *, oversize: bool = False
    ) -> Choice:
        """Return the plan that every rank runs. ``propose`` makes this rank's own choice, ``review`` judges another's.

        Raises on every rank alike: PlanningError when one cannot plan or is gone, AdmissionRefused or AdmissionUnknown
        when one does not fit. The rank that cannot plan raises what kept it from planning.
        """
        _, votes = self._vote(propose, oversize)
        proposal = proposed(votes)
        reviewed, votes = self._vote(lambda: review(proposal), oversize)
        admitted(votes)
        try:  # the rows of ranks that gave up waiting for this one are complete all the same
            self._look()
        except RuntimeError as error:
            raise self._broken(error) from error
        return reviewed

    def tell(self, error: Exception) -> None:
        """Make all peers raise PlanningError with this rank's reason, in the vote that they wait in or come to next."""
        self._gather(Vote(Outcome.PLANNING_ERROR, reason=f"{type(error).__name__}: {error}").row())

    def everyone(self, yes: bool) -> bool:
        """Say whether every rank says yes: for what ranks do together while they plan, such as probes.

        Raises PlanningError when another rank cannot plan.
        """
        votes = [Vote.of_row(row) for row in self._gather(Vote(Outcome.ADMITTED, units=int(yes)).row())]
        for rank, vote in enumerate(votes):
            if vote.outcome is Outcome.PLANNING_ERROR:
                raise _PeerError(f"rank {rank}: {vote.reason}")
        return all(vote.units for vote in votes)

    def _vote(self, make: Callable[[], Choice], oversize: bool) -> tuple[Choice, list[Vote]]:
        try:
            found = make()
        except _PeerError:
            raise
        except Exception as error:  # whatever kept this rank from planning is told to its peers before it is raised
            if not self._abandoned:
                self.tell(error)
            raise
        return found, [Vote.of_row(row) for row in self._gather(vote_of(found, oversize).row())]

    def _gather(self, row: list[int]) -> list[list[int]]:
        """Exchange one row of fixed length."""
        self.collectives += 1
        return [each.tolist() for each in self.gather(torch.tensor(row, dtype=torch.int64))]

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, of one shape. Raises PlanningError within a moment of a peer's death."""
        rows = [torch.empty_like(mine) for _ in range(distributed.get_world_size(self.group))]
        try:
            work = distributed.all_gather(rows, mine, group=self.group, async_op=True)
            self.wait(work)
        except RuntimeError as error:
            raise self._broken(error) from error
        return rows

    def abandon(self, error: BaseException) -> None:
        """Make all ranks raise PlanningError instead of waiting: this one has left work that they do together.

        No decision can be made afterwards; all ranks must be restarted.
        """
        self._abandoned = True
        with suppress(RuntimeError):  # the store's rank is gone, and everybody's connections with it
            if not self._store.check([_FAILED]):
                text = f"rank {self.rank} failed in what all ranks do together: {type(error).__name__}: {error}"
                self._store.set(_FAILED, f"{text[:1000]}; restart all ranks")

    def wait(self, work: distributed.Work) -> None:
        """Wait for a collective, looking into the store for a failure that another rank has noticed."""
        begun = looked = time.monotonic()
        while not work.is_completed():
            time.sleep(0.001)
            now = time.monotonic()
            if now - looked < _LOOK_SECONDS:
                continue
            looked = now
            self._look()
            if now - begun > self._patience:
                raise RuntimeError(f"a rank did not come within {self._patience} s")
        try:
            work.wait(timedelta(seconds=1))
        except RuntimeError as error:
            raise self._broken(error) from error

    def _look(self) -> None:
        """Raise what another rank has noticed, if any has."""
        if self._store.check([_FAILED]):
            raise _PeerError(self._store.get(_FAILED).decode())

    def _broken(self, error: RuntimeError) -> PlanningError:
        """Tell everybody what this rank noticed, and return it as the error to raise."""
        text = f"rank {self.rank} lost a peer: {str(error).splitlines()[0][:200]}"
        try:
            if self._store.check([_FAILED]):
                return PlanningError(self._store.get(_FAILED).decode())
            self._store.set(_FAILED, text)
        except RuntimeError:
            text = f"{text}; the store's rank is gone too"
        return PlanningError(f"{text}; restart all ranks")
