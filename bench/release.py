"""What each release policy does and costs, policies against each other in the same run.

First the public report's failure, rebuilt on a virtual card: five waves of hand-off and backward whose libraries are
built anew each time. Then equal steps without pressure: what looking costs when nothing is ever needed. Times are those
of the host's model of a card; docs/native.md has those of a real one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from trainer_rank.devices.virtual import VirtualDevice
from trainer_rank.events import Announcer
from trainer_rank.policies import load_policy
from trainer_rank.release.headroom import Headroom
from trainer_rank.release.incident import CARD, DEMANDS, elsewhere, snapshot
from trainer_rank.release.libraries import BACKWARD, FORWARD

POLICIES = ("none", "unconditional", "trigger-3-percent", "forecast")
"""Those that act at the hand-off or not at all; budgeted acts at admission, which needs a model: workload pressure."""
WAVES, STEPS = 5, 200


class Bench:
    """A headroom on a fresh virtual card, and what it reported."""

    def __init__(self, policy: str, **card: Any) -> None:  # noqa: ANN401 - passed on to the device, which types them
        self.device = VirtualDevice(CARD, **card)
        self.events: list[Mapping[str, Any]] = []
        self.headroom = Headroom(self.device, load_policy(policy), Announcer(self.events.append))

    def releases(self) -> list[Mapping[str, Any]]:
        """Releases that were made."""
        return [each for each in self.events if each["event"] == "release" and each["release_ns"]]

    def step(self) -> None:
        """A forward, the hand-off and a backward, served from the cache once it is warm."""
        with self.headroom.protected(FORWARD), self.headroom.working():
            torch.empty(300 << 20, dtype=torch.uint8, device=self.device.torch_device)
        self.headroom.hand_off(0, trains=True)
        with self.headroom.protected(BACKWARD):
            torch.empty(500 << 20, dtype=torch.uint8, device=self.device.torch_device)
            self.device.require(DEMANDS[0].phase)


def rebuilt_failure() -> None:
    """Print calls, bytes and outcome of every policy."""
    print(f"{'policy':20}{'waves':>7}{'calls':>7}{'bytes returned':>17}  outcome")
    for policy in POLICIES:
        bench = Bench(policy, elsewhere=elsewhere(), demands=DEMANDS, snapshot=snapshot())
        outcome, done = "finished", 0
        try:
            for _ in range(WAVES):
                bench.step()
                bench.device.give_up(DEMANDS[0].phase)
                done += 1
        except RuntimeError as error:
            outcome = str(error)
        returned = sum(sum(each["shrunk"].values()) for each in bench.releases())
        print(f"{policy:20}{done:>7}{len(bench.releases()):>7}{returned:>17,}  {outcome}")
        bench.device.close()


def equal_steps() -> None:
    """Print the time of steps without pressure against policy none, interleaved, and the releases made in them."""
    benches = {policy: Bench(policy, index=index) for index, policy in enumerate(POLICIES)}
    seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for _ in range(STEPS):
        for policy, bench in benches.items():
            begun = time.perf_counter()
            bench.step()
            seconds[policy].append(time.perf_counter() - begun)
    base = statistics.median(seconds["none"])
    print(f"\n{'policy':20}{'steps':>7}{'releases':>10}{'median us':>11}{'more than none us':>19}")
    for policy, bench in benches.items():
        median = statistics.median(seconds[policy])
        print(f"{policy:20}{STEPS:>7}{len(bench.releases()):>10}{median * 1e6:>11.1f}{(median - base) * 1e6:>19.1f}")
        bench.device.close()


def main() -> None:
    torch.set_num_threads(1)
    rebuilt_failure()
    equal_steps()


if __name__ == "__main__":
    main()
