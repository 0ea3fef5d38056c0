"""A whole run on the devices that are here, and its memory beside the plan's: `python benchmarks/gpu_loop.py --workdir DIR`.

The plan is made first, without compiling anything; then the run trains as `jaxagent train` does, with the embedded sandbox;
then the allocator says what was in use at most. `--config` and overrides are those of `jaxagent train`. `--model 0.5B` (or
1.5B) replaces the small policy by random weights of that shape: they learn nothing in a few steps but weigh what they weigh.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import jax
from gpu_engine import MODELS

from jaxagent import config as configs
from jaxagent import plan, train
from jaxagent.metrics import read

SHAPE = ("width", "layers", "heads", "kv_heads", "head_width", "ffn_width")
TOLD = (
    "reward/mean",
    "policy/sampler_logprob_gap",
    "policy/sampler_logprob_gap_max",
    "off_policy/rho_mean",
    "policy/grad_norm",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", default=str(Path(__file__).parents[1] / "configs" / "quickstart.py"))
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--model", choices=MODELS, default="")
    options, overrides = parser.parse_known_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if options.model:
        overrides += [f"--config.model.{name}={MODELS[options.model][name]}" for name in SHAPE]
    tree, found = configs.load(options.config, [each.removeprefix("--config.") for each in overrides])
    if found:
        raise configs.ConfigError(found)
    told = plan.forecast(plan.Shapes(tree), iteration_s=60.0)
    print("\n".join(plan.lines(told)), flush=True)
    began = time.perf_counter()
    code = train.main(tree, options.workdir)
    print(f"the run took {time.perf_counter() - began:.0f} s and ended with {code}")
    for record in read(Path(options.workdir) / "metrics.jsonl")[-20:]:
        known = {name: value for name, value in record.items() if name in TOLD or name.startswith("time/")}
        print(record["step"], ", ".join(f"{name} {value:.4g}" for name, value in known.items() if value is not None))
    stats, forecast = jax.devices()[0].memory_stats() or {}, max(told["peak_bytes"].values())
    if peak := int(stats.get("peak_bytes_in_use", 0)):
        print(f"in use at most {peak / 1e9:.3f} GB; the plan said {forecast / 1e9:.3f}: {forecast / peak:.2f} of it")
    return code


if __name__ == "__main__":
    sys.exit(main())
