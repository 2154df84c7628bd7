"""Whole ranks, one process each: whatever keeps one from planning, the others raise its reason and never hang."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

from qualification.execution.launch import free_port
from tests.trainer_rank.test_rank import _policy, _requests
from trainer_rank.admission.agree import Agreement
from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.models.reference import TINY, build_reference
from trainer_rank.rank import TrainerRank
from trainer_rank.reports.spool import Spool
from trainer_rank.requests import Request

FAULTY = 1


class _Rank:
    def __init__(self, rank: int, store: Any, folder: Path, sender: Connection) -> None:
        self.rank = rank
        self.sender = sender
        self.events: list[dict[str, Any]] = []
        self.device = VirtualDevice("h200", rank)
        self.model = build_reference(TINY, self.device, slots=("policy", "adversary"), rank=2)
        self.trainer = TrainerRank(
            self.model, _policy(), on_event=self.events.append, spool=Spool(folder), agreement=Agreement(store)
        )

    def answer(self, fault: str) -> dict[str, Any]:
        """Plan and run a batch under a fault; on what plan, or with which error, and when."""
        requests = _requests([30, 12], slots=("policy", "adversary"))
        if self.rank == FAULTY:
            requests = self.strike(fault, requests)
        self.events.clear()
        try:
            for micro_batch in self.trainer.forward_micro_batches(requests):
                loss = torch.stack([each.log_probabilities.mean() for each in micro_batch.outputs.values()]).sum()
                self.trainer.backward(micro_batch, loss)
        except Exception as error:
            found = {"error": type(error).__name__, "text": str(error)}
        else:
            found = {"digest": next(each["plan_sha256"] for each in self.events if each["event"] == "forecast")}
        for owner, name in ((self.model, "forward"), (self.device, "snapshot"), (self.optimizer, "prepare_gradients")):
            vars(owner).pop(name, None)
        kinds = [each["kind"] for each in self.events if each["event"] == "report"]
        return found | {"at": time.monotonic(), "reports": kinds}

    @property
    def optimizer(self) -> Any:
        return self.trainer._optimizers["policy"]

    def strike(self, fault: str, requests: list[Request]) -> list[Request]:
        def broken(*_: object, **__: object) -> None:
            if fault.startswith("die"):
                self.sender.send({"at": time.monotonic()})
                os._exit(9)
            raise RuntimeError(f"no {fault}")

        if fault == "requests":
            return [Request(each.tokens, each.targets, "critic") for each in requests]
        if fault == "die in the hand-off":
            self.trainer._headroom.hand_off = broken  # type: ignore[method-assign]
        elif fault in ("probe", "die in a probe"):
            self.model.forward = broken  # type: ignore[method-assign, assignment]
        elif fault == "sample":
            self.device.snapshot = broken  # type: ignore[method-assign, assignment]
        elif fault == "gradients":
            self.optimizer.prepare_gradients = broken
        return requests


def _run(rank: int, world: int, port: int, faults: tuple[str, ...], folder: Path, sender: Connection) -> None:
    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=60))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    member = _Rank(rank, store, folder / str(rank), sender)
    distributed.barrier()
    for fault in faults:
        sender.send(member.answer(fault))
    os._exit(0)


def _answers(folder: Path, *faults: str, world: int = 2) -> list[list[dict[str, Any]]]:
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    pipes = [spawn.Pipe(duplex=False) for _ in range(world)]
    started = [
        spawn.Process(target=_run, args=(rank, world, port, faults, folder, pipes[rank][1]), daemon=True)
        for rank in range(world)
    ]
    for process in started:
        process.start()
    found = []
    for process, (receiver, sender) in zip(started, pipes, strict=True):
        sender.close()
        answers = []
        while receiver.poll(90):
            try:
                answers.append(receiver.recv())
            except EOFError:
                break
        process.join(60)
        found.append(answers)
    return found


def test_a_rank_that_cannot_plan_tells_its_peer_why_and_both_can_go_on(tmp_path: Path) -> None:
    faults = ("requests", "gradients", "probe", "none", "sample", "none")
    healthy, faulty = _answers(tmp_path, *faults)
    for fault, other, own in zip(faults, healthy, faulty, strict=True):
        if fault == "none":
            assert other["digest"] == own["digest"]
            continue
        expected = "InvalidInputError" if fault == "requests" else "RuntimeError"
        assert own["error"] == expected
        assert other["error"] == "PlanningError"
        assert f"rank 1: {expected}: {own['text'][:100]}" in other["text"]
        assert other["reports"] == ["planning_error"]
        if fault != "probe":  # there the peer has probes of its own to finish first
            assert other["at"] - own["at"] < 1.0, fault


def test_a_rank_that_dies_while_it_probes_is_missed_at_once(tmp_path: Path) -> None:
    ((answer,), _) = _answers(tmp_path, "die in a probe")
    assert answer["error"] == "PlanningError"
    assert "lost a peer" in answer["text"]


def test_a_rank_that_dies_before_the_hand_off_is_missed_by_all_within_a_second(tmp_path: Path) -> None:
    (first,), (died,), (last,) = _answers(tmp_path, "die in the hand-off", world=3)
    for answer in (first, last):
        assert answer["error"] == "PlanningError"
        assert "lost a peer" in answer["text"]
        assert answer["at"] - died["at"] < 1.0
