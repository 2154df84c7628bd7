"""Record allocation traces of whole steps of the Megatron model: ``python -m bench.native.tapes FOLDER LAYERS...``.

Each trace is one steady step (forward, loss, backward, optimizer) of one packed shape at one layer count, with its
stages marked and its features stated, as ``qualify tape fit`` reads them. Needs the extra [megatron] and a CUDA device.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench.native.batches import ragged
from bench.native.megatron import built
from trainer_rank.admission.ladder import Plan, Retention
from trainer_rank.allocator.trace import save_trace
from trainer_rank.devices.cuda import CudaDevice
from trainer_rank.devices.protocol import Recording
from trainer_rank.devices.steady import record_steady
from trainer_rank.errors import TraceError
from trainer_rank.execution import PlanRun, in_phases
from trainer_rank.features import plan_features
from trainer_rank.geometry import Topology
from trainer_rank.models.megatron.runtime import MegatronRuntime
from trainer_rank.optimizer import OptimizerSettings, SlotOptimizer
from trainer_rank.packing import GroupKey, Subforward
from trainer_rank.requests import Request, RequestShape

SHAPES = {
    "2x2048": [2048] * 2,
    "2x8192": [8192] * 2,
    "2x32768": [32768] * 2,
    "ragged4096": ragged(4_000, 1),
    "ragged8192": ragged(8_000, 2),
    "ragged16384": ragged(16_000, 3),
    "ragged65536": ragged(64_000, 4),
}
"""Few sizes of the grid, so that kernels tune seldom; ragged packs leave a filler."""
RETENTIONS = (Retention.DEVICE, Retention.RERUN)


class Step:
    """One whole step of one slot, repeatable; gradient buffers and optimizer states exist."""

    def __init__(self, runtime: MegatronRuntime, lengths: list[int], retention: Retention) -> None:
        self.runtime = runtime
        shapes = tuple(RequestShape(index, length, "policy", True) for index, length in enumerate(lengths))
        key = GroupKey(slot="policy", gradients=True, hidden=False)
        self.plan = Plan("tape", (Subforward(key, shapes),), retention)
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
        """The plan's features as the kernels see them, with the layer count."""
        subforward = self.plan.subforwards[0]
        parameters = self.runtime.adapter_parameters("policy").values()
        return {
            **plan_features(
                self.runtime.executed_lengths(subforward.lengths),
                self.runtime.geometry,
                self.runtime.topology,
                output_rows=subforward.packed_tokens,
                adapter_bytes=sum(each.numel() * each.element_size() for each in parameters),
            ),
            "layers": self.runtime.geometry.layers,
            "context": self.runtime.topology.context,
        }


def record(folder: Path, device: CudaDevice, layers: int, wanted: list[str], ranks: int) -> None:
    """Record the wanted shapes, whole and rerun, at one layer count; of several ranks, the first one's are kept."""
    with built(device, layers, topology=Topology(context=ranks)) as runtime:
        optimizer = SlotOptimizer(runtime.adapter_parameters("policy"), OptimizerSettings())
        optimizer.prepare_gradients()
        for name in wanted:
            for retention in RETENTIONS:
                step = Step(runtime, SHAPES[name], retention)
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
    """Record ``LAYERS[:NAME,NAME...]`` one after the other; under torchrun the ranks share each step's context."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = CudaDevice(int(os.environ.get("LOCAL_RANK", "0")))
    for each in wanted:
        layers, _, names = each.partition(":")
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        record(folder, device, int(layers), names.split(",") if names else list(SHAPES), ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
