"""One of several processes that join, tell each other things and take two steps together; what it found goes to a file.

python tests/several_hosts.py OUT    with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_NUM_CPU_DEVICES
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
from jaxagent.hosts import Hosts, check_mesh, here, is_here, join, meet, put_rows, rows_here, spread_fn, taken
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.metrics import Mean
from jaxagent.models.transformer import Decoder, logical_axes
from jaxagent.sharding import DeviceMesh

CONFIG = tiny.config(layers=1)
OPTIONS = LearnerOptions(batch_rows=8, row_tokens=16, head_chunk=64)


def rows(count: int = 20) -> list[Row]:
    """Rows of several lengths and advantages; the first token of each is given."""
    rng, found = np.random.default_rng(5), []
    for _ in range(count):
        n = int(rng.integers(6, 12))
        tokens = rng.integers(0, CONFIG.vocab_size, n).tolist()
        advantage = [float(rng.normal())] * n
        found.append(Row(tokens, [False] + [True] * (n - 1), [-3.0] * n, advantage, [1.0] * n, [1.0] * n))
    return found


def two_steps(learner: Learner, hosts: Hosts) -> dict[str, float]:
    """Two updates on rows that the hosts share unevenly: the second has one in five, a third another, a fourth has none."""
    learner.begin(OptimizerOptions(lr=1e-3, warmup_steps=0), 2)
    for _ in range(2):
        owners = (1, 0, 0, 0, 2 if hosts.count > 2 else 0) if hosts.count > 1 else (0,)
        mine = [row for i, row in enumerate(rows()) if owners[i % len(owners)] == hosts.index]
        packed = pack(mine, batch_rows=learner.own_rows, row_tokens=OPTIONS.row_tokens)
        ((batches, idle),) = hosts.level([(packed, 1.0 / hosts.count)], learner.empty)
        for batch in batches:
            learner.accumulate(batch)
        told = learner.apply(idle)
    return {**told, "batches": len(batches), "own": len(packed)}


def everything(params: Any) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float32) for path, leaf in flat}


def pointers(x: jax.Array) -> dict[int, int]:
    """Where the shards of an array lie in memory, by device, as far as they are here."""
    return {shard.device.id: shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


def told_each_other(hosts: Hosts) -> dict[str, bool]:
    n = hosts.count
    gathered = hosts.gather({"of": hosts.index, "long": "x" * 3000 * hosts.index})
    values = {"a": Mean(1 + hosts.index, 1 + 3 * hosts.index), "n_calls": 2.0, "z_max": float(hosts.index)}
    total, count = sum(1 + i for i in range(n)), sum(1 + 3 * i for i in range(n))
    waits = hosts.waits()
    return {
        "gathered": gathered == [{"of": i, "long": "x" * 3000 * i} for i in range(n)],
        "together": hosts.together(hosts.share("abcde")) == list("abcde"),
        "any": hosts.any(hosts.index == n - 1) and not hosts.any(False),
        "combined": hosts.combined(values) == {"a": total / count, "n_calls": 2.0 * n, "z_max": n - 1.0},
        "waits": 0 <= waits["hosts/waited_s_min"] <= waits["hosts/waited_s_max"] and 0 <= waits["hosts/slowest"] < n,
    }


def main(out: str) -> None:
    join()
    hosts = here()
    own_devices, n = len(jax.local_devices()), hosts.count
    mesh = DeviceMesh.build(data=n * own_devices // 4, fsdp=4)
    check_mesh(mesh, hosts)
    meet(mesh)
    facts: dict[str, Any] = told_each_other(hosts)
    own = np.arange(3.0 * own_devices, dtype=np.float32).reshape(-1, 3) + 100 * hosts.index
    placed = put_rows({"x": own}, mesh.sharding(("rows", None)))["x"]
    facts["rows"] = placed.shape == (n * own_devices, 3) and bool((rows_here(placed) == own).all())
    learner = Learner(CONFIG, tiny.params(CONFIG), mesh, TABLE["grpo"], OPTIONS)
    told = two_steps(learner, hosts)
    replicas = [replica for replica in mesh.replicas() if is_here(replica)]
    spread = spread_fn(mesh, logical_axes(nnx.eval_shape(lambda: Decoder(CONFIG, nnx.Rngs(0)))), None, replicas)
    parts = list(spread(learner.params))
    facts["local"] = all(leaf.is_fully_addressable for leaf in jax.tree.leaves(parts))
    each = tiny.put_together(parts)
    first, *others = (everything(params) for params in each)
    facts["replicas"] = len(each) == own_devices and all((first[name] == x).all() for one in others for name, x in one.items())
    everywhere = jax.jit(lambda: np.arange(6.0), out_shardings=mesh.sharding((None,)))()
    alike = [taken(everywhere, (None,), replica) for replica in replicas]
    assert not everywhere.is_fully_addressable
    facts["no copies"] = {d: p for x in alike for d, p in pointers(x).items()} == pointers(everywhere)
    np.savez(
        out, **first, **{f"fact {name}": value for name, value in facts.items()}, **{f"told {n}": v for n, v in told.items()}
    )


if __name__ == "__main__":
    main(sys.argv[1])
