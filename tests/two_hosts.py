"""One of two processes that join, tell each other things and take two steps together; what it found goes to a file.

python tests/two_hosts.py OUT    with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_NUM_CPU_DEVICES
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import tiny
from flax import nnx

from jaxagent.algos.table import TABLE
from jaxagent.data.pack import Row, pack
from jaxagent.hosts import Hosts, check_mesh, here, is_here, join, meet, put_rows, rows_here, spread_fn
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.metrics import Mean
from jaxagent.models.transformer import Decoder, logical_axes
from jaxagent.sharding import DeviceMesh

CONFIG = tiny.config(layers=1)
OPTIONS = LearnerOptions(batch_rows=4, row_tokens=16, head_chunk=64)


def rows(count: int = 10) -> list[Row]:
    """Rows of several lengths and advantages; the first token of each is given."""
    rng, found = np.random.default_rng(5), []
    for _ in range(count):
        n = int(rng.integers(6, 12))
        tokens = rng.integers(0, CONFIG.vocab_size, n).tolist()
        advantage = [float(rng.normal())] * n
        found.append(Row(tokens, [False] + [True] * (n - 1), [-3.0] * n, advantage, [1.0] * n, [1.0] * n))
    return found


def two_steps(learner: Learner, hosts: Hosts) -> dict[str, float]:
    """Two updates on rows that the hosts share unevenly: the second host has one in five, and fewer micro-batches."""
    learner.begin(OptimizerOptions(lr=1e-3, warmup_steps=0), 2)
    for _ in range(2):
        mine = [row for i, row in enumerate(rows()) if hosts.count == 1 or (i % 5 == 0) == (hosts.index == 1)]
        packed = pack(mine, batch_rows=learner.own_rows, row_tokens=OPTIONS.row_tokens)
        ((batches, idle),) = hosts.level([(packed, 1.0 / hosts.count)], learner.empty)
        for batch in batches:
            learner.accumulate(batch)
        told = learner.apply(idle)
    return {**told, "batches": len(batches), "own": len(packed)}


def everything(params: Any) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float32) for path, leaf in flat}


def main(out: str) -> None:
    join()
    hosts, mesh = here(), DeviceMesh.build(data=1, fsdp=4)
    assert hosts.count == 2 and len(jax.local_devices()) == 2
    check_mesh(mesh, hosts)
    meet(mesh)
    facts: dict[str, Any] = {
        "gathered": hosts.gather({"of": hosts.index, "long": "x" * 3000 * hosts.index})
        == [{"of": 0, "long": ""}, {"of": 1, "long": "x" * 3000}],
        "together": hosts.together(hosts.share("abcde")) == list("abcde"),
        "any": hosts.any(hosts.index == 1) and not hosts.any(False),
        "combined": hosts.combined(
            {"a": Mean(1 + hosts.index, 1 + 3 * hosts.index), "n_calls": 2.0, "z_max": float(hosts.index)}
        )
        == {"a": 0.6, "n_calls": 4.0, "z_max": 1.0},
    }
    own = np.arange(6.0, dtype=np.float32).reshape(2, 3) + 100 * hosts.index
    placed = put_rows({"x": own}, mesh.sharding(("rows", None)))["x"]
    facts["rows"] = placed.shape == (4, 3) and bool((rows_here(placed) == own).all())
    learner = Learner(CONFIG, tiny.params(CONFIG), mesh, TABLE["grpo"], OPTIONS)
    told = two_steps(learner, hosts)
    replicas = [replica for replica in mesh.replicas() if is_here(replica)]
    spread = spread_fn(mesh, logical_axes(nnx.eval_shape(lambda: Decoder(CONFIG, nnx.Rngs(0)))), None, replicas)
    each = spread(learner.params)
    facts["local"] = all(leaf.is_fully_addressable for params in each for leaf in jax.tree.leaves(params))
    first, second = (everything(params) for params in each)
    facts["replicas"] = len(each) == 2 and all((first[name] == second[name]).all() for name in first)
    np.savez(
        out, **first, **{f"fact {name}": value for name, value in facts.items()}, **{f"told {n}": v for n, v in told.items()}
    )


if __name__ == "__main__":
    main(sys.argv[1])
