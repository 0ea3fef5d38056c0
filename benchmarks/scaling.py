"""What it costs that hosts meet at the gradient: `python benchmarks/scaling.py`, weak scaling on a clock that is not real.

Every host has an engine, tools and a share of the step of its own, always as large, and shares nothing while it samples; a step
is over when the slowest host has its gradient (jaxagent/hosts.py). So a host's step can be played by itself, and N hosts take
the longest of N steps. Feed, rollouts, agent and slots are the trainer's, the device is a roofline, tools are log-normal
latencies (benchmarks/scheduling.py, benchmarks/clocked.py). Measured is how long steps of one host take, `--samples` of them
with luck of their own, synchronous, and with the gradient in the engine's gaps. The mean of the longest of N is over all ways
to choose N of them. Not in it: the collectives; and rollouts ahead of their step, with which a host plays on while it waits.

efficiency: sampled tokens per second and host, over those of one host alone. "one at half speed": one of the hosts has a device
of half the speed, tools are as fast as the others'.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clocked import Device
from scheduling import Run, Shape

HOSTS = (1, 2, 4, 8, 16)
LOADS = {
    "tools of 0.2 s, 5 to 10 turns": Shape(groups=8, turns=(5, 10), tool_s=0.2),
    "tools of 2 s, 5 to 10 turns": Shape(groups=8, turns=(5, 10)),
    "tools of 2 s, 5 to 50 turns": Shape(groups=8, turns=(5, 50)),
}
SLOTS = 64  # as many as a host's share has episodes


def sampled(shape: Shape, slow: float = 1.0) -> tuple[float, int]:
    """Seconds of a host's step and the tokens that it samples; `slow` times as slow a device."""
    device = Device()
    rates = {name: getattr(device, name) / slow for name in ("bandwidth", "prefill_flops", "train_flops")}
    run = Run(shape, SLOTS, device=replace(device, **rates))
    try:
        groups = run.step(0, 0)
        return run.clock.time(), sum(sum(row.mask) for group in groups for row in group.trajectories)
    finally:
        run.close()


def longest(seconds: Sequence[float], count: int) -> float:
    """The mean of the largest of `count` of these numbers, over all ways to choose them.

    Sum over i of x_(i) C(i - 1, n - 1) / C(m, n), for the m numbers in rising order: x_(i) is the largest of so many choices.
    """
    ordered = sorted(seconds)
    return sum(x * math.comb(i, count - 1) for i, x in enumerate(ordered)) / math.comb(len(ordered), count)


def longest_beside(seconds: Sequence[float], other: Sequence[float], count: int) -> float:
    """The same where one of the `count` is of the other numbers."""
    if count == 1:
        return sum(other) / len(other)
    ordered = sorted(seconds)
    found = 0.0
    for slow in other:
        found += sum(max(x, slow) * math.comb(i, count - 2) for i, x in enumerate(ordered))
    return found / len(other) / math.comb(len(ordered), count - 1)


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=24, help="steps of one host")
    options = parser.parse_args()
    if options.samples < HOSTS[-1]:
        parser.error(f"--samples must be at least {HOSTS[-1]}, the most hosts; got {options.samples}")
    began = time.process_time()
    print("| a host's step: 8 groups of 8 | hosts | s per step | efficiency | one at half speed: s per step | efficiency |")
    print("|---|" + "---:|" * 5)
    for name, shape in LOADS.items():
        steps = [sampled(replace(shape, seed=seed)) for seed in range(options.samples)]
        seconds = [s for s, _ in steps]
        slow = [sampled(replace(shape, seed=1000 + seed), slow=2.0)[0] for seed in range(max(4, options.samples // 4))]
        for count in HOSTS:
            even, uneven = longest(seconds, count), longest_beside(seconds, slow, count)
            alone = longest(seconds, 1)
            print(f"| {name} | {count} | {even:.1f} | {alone / even:.2f} | {uneven:.1f} | {alone / uneven:.2f} |", flush=True)
    print(f"\n{time.process_time() - began:.0f} CPU-s")


if __name__ == "__main__":
    main()
