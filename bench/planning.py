"""How long it takes to plan without a device: process seconds, the best of three, of shipped tapes at 40 layers."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable

from trainer_rank.devices.cards import load_card
from trainer_rank.packing import Work, layouts, units
from trainer_rank.planning.batch import Batch, load_incident
from trainer_rank.planning.choose_tape import best_shipped
from trainer_rank.planning.plan import plan_batch
from trainer_rank.planning.target import Target
from trainer_rank.policies import load_policy
from trainer_rank.prefixes import Prefixes
from trainer_rank.requests import RequestShape


def best(work: Callable[[], object]) -> float:
    """Process seconds of the fastest of three runs."""
    taken = []
    for _ in range(3):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return min(taken)


def command(*arguments: str) -> float:
    """Wall seconds of the fastest of three processes."""
    taken = []
    for _ in range(3):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", *arguments], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - begun)
    return min(taken)


def batch(lengths: list[int], together: bool) -> Batch:
    """Return a batch of one group, or of a group for each request."""
    shapes = tuple(
        RequestShape(index, length, group="g" if together else str(index)) for index, length in enumerate(lengths)
    )
    return Batch("drawn", (shapes,) if together else tuple((each,) for each in shapes), 1, sum(lengths))


def pack(shapes: list[RequestShape]) -> None:
    """Form units, groups in both layouts, and the first cut."""
    prefixes = Prefixes(tuple(range(len(shapes))), tuple(min(8, each.length) * (each.index % 8 > 0) for each in shapes))
    units(shapes)
    Work(layouts(shapes, prefixes)[0])[1]


def main() -> None:
    """Print every figure."""
    draw = random.Random(3)
    histories = [draw.randint(6_000, 20_000) for _ in range(19)]
    many = [draw.randint(1, draw.choice((40, 200))) for _ in range(10_000)]
    shapes = [RequestShape(index, length, ("policy", "adversary")[index % 2]) for index, length in enumerate(many)]
    shelf, card, policy = best_shipped(Target(1)), load_card("h200"), load_policy("forecast")

    def plan(what: Batch) -> float:
        return best(lambda: plan_batch(what, card, shelf, policy))

    print(f"pack 10,000 requests that share prefixes: {best(lambda: pack(shapes)) * 1e3:.0f} ms")
    print(f"plan 19 histories of 6,000 to 20,000 tokens, 40 layers: {plan(batch(histories, True)):.2f} s")
    print(f"plan incident-a: {plan(load_incident('incident-a')):.2f} s")
    print(f"plan 10,000 requests in one group: {plan(batch(many, True)):.2f} s")
    print(f"plan 10,000 requests, each by itself: {plan(batch(many, False)):.2f} s")
    run = "from flows.cli.main import main; main()"
    whole = command(run, "plan", "incident-a", "--json")
    imports = command("import flows.cli.main, flows.cli.plan")
    print(f"qualify plan incident-a --json: {whole:.2f} s, of which {imports:.2f} s start the interpreter and import")
