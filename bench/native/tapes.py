"""Record allocation traces of whole steps of the Megatron model: ``python -m bench.native.tapes FOLDER WHAT...``.

``WHAT`` is LAYERS[:SHAPE,SHAPE...[:RETENTION,RETENTION...]]. Each trace is one steady step (forward, loss, backward,
optimizer) of one packed shape at one layer count, stages marked and features stated, as ``qualify tape fit``
reads them. Shapes joined by ``+`` are the subforwards of one plan. Needs the extra [megatron] and a CUDA device.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench.native.megatron import built
from bench.native.plans import SHAPES, plan_of
from trainer_rank.admission.ladder import Retention
from trainer_rank.allocator.trace import save_trace
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.devices.protocol import Recording
from trainer_rank.devices.steady import record_steady
from trainer_rank.errors import TraceError
from trainer_rank.execution import PlanRun, in_phases
from trainer_rank.features import plan_features
from trainer_rank.geometry import Topology
from trainer_rank.models.protocol import ModelRuntime
from trainer_rank.optimizer import OptimizerSettings, SlotOptimizer
from trainer_rank.requests import Request

RETENTIONS = (Retention.DEVICE, Retention.RERUN)
"""What is recorded unless other retentions are named."""


class Step:
    """One whole step of one slot, repeatable; gradient buffers and optimizer states exist."""

    def __init__(self, runtime: ModelRuntime, shape: str, retention: Retention) -> None:
        self.runtime = runtime
        self.plan = plan_of(shape, retention)
        lengths = [request.length for each in self.plan.subforwards for request in each.requests]
        rows = [torch.randint(16, runtime.geometry.vocabulary, (length + 1,)) for length in lengths]
        self.requests = {index: Request(row[:-1], row[1:], "policy") for index, row in enumerate(rows)}

    def run(self, optimizer: SlotOptimizer, recording: Recording) -> None:
        """Forward, mean loss, backward, optimizer step; every stage marked."""
        run = PlanRun(self.runtime, self.plan, self.requests, recording.mark)
        run.forward()
        run.backward(-torch.stack([each.log_probabilities.mean() for each in run.outputs.values()]).mean())
        recording.mark("optimizer")
        optimizer.step()

    def features(self) -> dict[str, int]:
        """The layer count, and of one subforward the features of what the kernels see; of several their number."""
        known = {"layers": self.runtime.geometry.layers, "context": self.runtime.topology.context}
        if len(self.plan.subforwards) > 1:
            tokens = sum(self.plan.packed_tokens)
            return {"subforwards": len(self.plan.subforwards), "tokens": tokens} | known
        subforward = self.plan.subforwards[0]
        parameters = self.runtime.adapter_parameters("policy").values()
        found = plan_features(
            self.runtime.executed_lengths(subforward.lengths),
            self.runtime.geometry,
            self.runtime.topology,
            output_rows=subforward.packed_tokens,
            adapter_bytes=sum(each.numel() * each.element_size() for each in parameters),
        )
        return found | known


def record(
    folder: Path, device: CudaDevice, layers: int, wanted: list[str], retentions: list[Retention], ranks: int
) -> None:
    """Record the wanted shapes and retentions at one layer count; of several ranks, the first one's are kept."""
    with built(device, layers, topology=Topology(context=ranks)) as runtime:
        optimizer = SlotOptimizer(runtime.adapter_parameters("policy"), OptimizerSettings())
        optimizer.prepare_gradients()
        for name in wanted:
            for retention in retentions:
                step = Step(runtime, name, retention)
                with device.activate():
                    try:
                        steady = record_steady(
                            device, lambda recording, step=step: step.run(optimizer, recording), agree=every_rank
                        )
                    except TraceError as error:
                        print(f"{layers} layers {name} {retention.value}: {error}", flush=True)
                        continue
                if int(os.environ.get("RANK", "0")):
                    continue
                trace = replace(
                    steady.trace,
                    features=step.features(),
                    marks=in_phases(steady.trace.marks),
                    source=f"megatron cp{ranks} {layers} layers {name} {retention.value}",
                )
                save_trace(trace, folder / f"h200_megatron_cp{ranks}_L{layers}_{name}_{retention.value}.json.gz")
                print(
                    f"{trace.source}: {len(trace.events)} events, peaks {trace.peak_allocated} / "
                    f"{trace.peak_reserved}, {steady.passes} passes {steady.disturbances}, outside {steady.outside}",
                    flush=True,
                )


def every_rank(steady: bool) -> bool:
    """Whether all ranks are steady."""
    if "RANK" not in os.environ:
        return steady
    vote = torch.tensor(int(steady), device="cuda")
    torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MIN)
    return bool(vote.item())


def main(folder: Path, wanted: list[str]) -> None:
    """Record one after the other; under torchrun the ranks share each step's context."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = CudaDevice(int(os.environ.get("LOCAL_RANK", "0")))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for each in wanted:
        layers, names, kept = [*each.split(":"), "", ""][:3]
        retentions = [Retention(name) for name in kept.split(",")] if kept else list(RETENTIONS)
        record(folder, device, int(layers), names.split(",") if names else list(SHAPES), retentions, ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
