"""Record allocation traces of whole steps of the Megatron model: ``python -m bench.native.tapes FOLDER LAYERS...``.

Each trace is one steady step (forward, loss, backward, optimizer) of one packed shape at one layer count, with its
stages marked and its features stated, as ``qualify tape fit`` reads them. Needs the extra [megatron] and a CUDA device.
"""

from __future__ import annotations

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


def record(folder: Path, device: CudaDevice, layers: int, wanted: list[str]) -> None:
    """Record the wanted shapes, whole and rerun, at one layer count."""
    with built(device, layers) as runtime:
        optimizer = SlotOptimizer(runtime.adapter_parameters("policy"), OptimizerSettings())
        optimizer.prepare_gradients()
        for name in wanted:
            for retention in RETENTIONS:
                step = Step(runtime, SHAPES[name], retention)
                with device.activate():
                    try:
                        steady = record_steady(device, lambda recording, step=step: step.run(optimizer, recording))
                    except TraceError as error:
                        print(f"{layers} layers {name} {retention.value}: {error}", flush=True)
                        continue
                trace = replace(
                    steady.trace,
                    features=step.features(),
                    marks=in_phases(steady.trace.marks),
                    source=f"megatron {layers} layers {name} {retention.value}",
                )
                save_trace(trace, folder / f"h200_megatron_L{layers}_{name}_{retention.value}.json.gz")
                print(
                    f"{trace.source}: {len(trace.events)} events, peaks {trace.peak_allocated} / "
                    f"{trace.peak_reserved}, {steady.passes} passes {steady.disturbances}, outside {steady.outside}",
                    flush=True,
                )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for count in sys.argv[2:]:
        number, _, names = count.partition(":")
        record(target, CudaDevice(0), int(number), names.split(",") if names else list(SHAPES))
