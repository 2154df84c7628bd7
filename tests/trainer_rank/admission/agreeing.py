"""Ranks of a real Gloo group, one process each, that make decisions together; used by test_agree.py."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as distributed

from qualification.execution.launch import free_port
from tests.trainer_rank.admission.test_planner import RUNGS, _Linear
from trainer_rank.admission.agree import Agreement
from trainer_rank.admission.budget import Budget
from trainer_rank.admission.planner import Choice, choose, consider
from trainer_rank.admission.vote import Proposal, plan_digest
from trainer_rank.errors import TrainerRankError
from trainer_rank.packing import units
from trainer_rank.requests import RequestShape


class _Uncosted(_Linear):
    def cost_ns(self, plan: object) -> None:  # type: ignore[override]
        return None


def decide_together(world: int, *jobs: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Start ``world`` processes that make the decisions of ``jobs`` one after the other; answers per rank and job."""
    fork, port = multiprocessing.get_context("fork"), free_port()
    pipes = [fork.Pipe(duplex=False) for _ in range(world)]
    started = [
        fork.Process(target=_rank, args=(rank, world, port, jobs, pipes[rank][1]), daemon=True) for rank in range(world)
    ]
    for process in started:
        process.start()
    answers = []
    for process, (receiver, sender) in zip(started, pipes, strict=True):
        sender.close()
        found = []
        while receiver.poll(60):
            try:
                found.append(receiver.recv())
            except EOFError:
                break
        process.join(60)
        answers.append(found)
    return answers


def _rank(rank: int, world: int, port: int, jobs: tuple[dict[str, Any], ...], sender: Connection) -> None:
    store = distributed.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=20))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    agreement = Agreement(store, patience=jobs[0].get("patience", 30.0))
    distributed.barrier()
    for job in jobs:
        sender.send(_decide(agreement, rank, job, sender) | {"at": time.monotonic()})
    time.sleep(jobs[-1].get("linger", 0.3))  # rank 0 serves the store
    os._exit(0)


def _decide(agreement: Agreement, rank: int, job: dict[str, Any], sender: Connection) -> dict[str, Any]:
    fault = job.get("fault") if job.get("faulty") == rank else None
    group = None if job.get("ungrouped") else "g"
    pending = units([RequestShape(index, length, group=group) for index, length in enumerate(job["lengths"])])
    budget, oversize = Budget(7, job["free"][rank], 1 << 50), bool(job.get("oversize", {}).get(rank))
    before = agreement.collectives

    def propose() -> Choice:
        _strike(fault, "propose", sender)
        return choose(pending, RUNGS, _Uncosted(), budget, oversize=oversize)

    def review(proposal: Proposal) -> Choice:
        _strike(fault, "review", sender)
        return consider(pending, RUNGS, _Uncosted(), budget, proposal.units, proposal.ordinal, oversize=oversize)

    try:
        choice = agreement.decide(propose, review, oversize=oversize)
    except TrainerRankError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except RuntimeError as error:
        return {"error": "own", "text": str(error)}
    assert choice.plan is not None
    found = {"digest": plan_digest(choice.plan), "rung": choice.plan.rung, "units": choice.units}
    return found | {"collectives": agreement.collectives - before}


def _strike(fault: object, point: str, sender: Connection) -> None:
    if fault == f"die:{point}":
        sender.send({"at": time.monotonic()})
        os._exit(9)
    if fault == f"sleep:{point}":
        time.sleep(3)
    if fault == f"raise:{point}":
        raise RuntimeError("no tape for this shape")
