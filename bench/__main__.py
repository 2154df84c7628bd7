"""Run the benchmarks one after another: ``python -m bench [NAME]...``; each prints its figures and its peer's ratio."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time

import bench


def main(wanted: list[str]) -> int:
    """Run the named benchmarks, or all of them; return 1 when one of them raised, 2 for an unknown name."""
    names = sorted(module.name for module in pkgutil.iter_modules(bench.__path__) if not module.name.startswith("_"))
    if unknown := sorted(set(wanted) - set(names)):
        print(f"no benchmark is named {', '.join(unknown)}; known: {', '.join(names)}", file=sys.stderr)
        return 2
    failed = []
    for name in wanted or names:
        print(f"== {name}", flush=True)
        started = time.perf_counter()
        try:
            importlib.import_module(f"bench.{name}").main()
        except Exception as error:
            failed.append(name)
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
        print(f"-- {name}: {time.perf_counter() - started:.1f} s\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
