"""Several processes as one run. They hold one training mesh together; each samples on its own, and they meet at the gradient.

A host is a process with devices of its own. What hosts tell each other is small, as JSON: how many micro-batches they have, how
groups ended, means as (sum, count). Batches lie where they were made, and weights come as parts of the published arrays.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxagent.metrics import Mean
from jaxagent.sharding import DeviceMesh, layer_of, layers_of
from jaxagent.watchdog import AGAIN

HEARTBEAT_S = 30  # after which a host that says nothing is dead, and the others end
JOIN_S = 300  # in which all hosts must have come


class Hosts:
    """This process among all of a run. Alone, it is told nothing and tells nobody."""

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count
        self._waited_s = 0.0

    @property
    def first(self) -> bool:
        """Whether this process writes what a run writes once."""
        return self.index == 0

    @property
    def voice(self) -> TextIO | None:
        """Where progress is told: by the first host on its terminal, by the others nowhere. Faults are told by all."""
        return None if self.first else Path(os.devnull).open("w")

    def own(self, name: str) -> str:
        """The name of a file that every host writes for itself: run.log, run-1.log, run-2.log."""
        path = Path(name)
        return name if self.first else f"{path.stem}-{self.index}{path.suffix}"

    def owns(self, number: int) -> bool:
        """Whether what has this number, a group or a task, is this host's share."""
        return number % self.count == self.index

    def share(self, items: Sequence[Any]) -> list[Any]:
        """This host's part of what all hosts know."""
        return list(items[self.index :: self.count])

    def gather(self, value: Any) -> list[Any]:
        """What every host gives, as JSON, in their order. All call it, at the same place."""
        if self.count == 1:
            return [value]
        told, began = np.frombuffer(json.dumps(value).encode(), np.uint8), time.monotonic()
        sizes = multihost_utils.process_allgather(np.asarray(len(told)))
        self._waited_s += time.monotonic() - began
        room = 1 << max(10, int(sizes.max() - 1).bit_length())  # few sizes, so that few programs exist
        rows = multihost_utils.process_allgather(np.pad(told, (0, room - len(told))))
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def together(self, shares: Sequence[Any]) -> list[Any]:
        """What the hosts made of their shares, in the order that it had before it was shared."""
        rows = itertools.zip_longest(*self.gather(list(shares)), fillvalue=_MISSING)
        return [item for row in rows for item in row if item is not _MISSING]

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def level(self, parts: Sequence[tuple[list[Any], float]], empty: Callable[[], Any]) -> list[tuple[list[Any], float]]:
        """Lists as long as the longest that any host has in their place, filled up with what `empty` makes; and summed numbers.

        A micro-batch is a program of all hosts: who has fewer joins in with rows that weigh nothing.
        """
        told = self.gather([[len(items), number] for items, number in parts])
        columns = list(zip(*told, strict=True))
        most = [max(length for length, _ in column) for column in columns]
        sums = [sum(number for _, number in column) for column in columns]
        return [
            (items + [empty() for _ in range(n - len(items))], total)
            for (items, _), n, total in zip(parts, most, sums, strict=True)
        ]

    def combined(self, values: Mapping[str, float]) -> dict[str, float]:
        """A step's metrics of all hosts: means by their sums and counts, counters summed, the rest by the mean over hosts."""
        if self.count == 1:
            return dict(values)
        told = self.gather({name: [v.total, v.count] if isinstance(v, Mean) else v for name, v in values.items()})
        names = dict.fromkeys(name for one in told for name in one)
        return {name: _joined(name, [one[name] for one in told if name in one]) for name in names}

    def waits(self) -> dict[str, float]:
        """Who waits for whom: the most and the least that a host has waited for the others, where they tell each other
        something, since this was called last; and the slowest host, which waited least. Nothing where one is alone.
        """
        if self.count == 1:
            return {}
        waited, self._waited_s = self.gather(self._waited_s), 0.0
        least = min(waited)
        return {"hosts/waited_s_max": max(waited), "hosts/waited_s_min": least, "hosts/slowest": float(waited.index(least))}

    @contextmanager
    def ending_together(
        self, known: tuple[type[Exception], ...] = (), overran: Callable[[], int] = lambda: 0
    ) -> Iterator[None]:
        """A host that fails ends at once: waiting for the others at its exit, it would wait for those that wait for it.

        Args:
            known: what is told in a sentence.
            overran: how to end where another host was lost; 0 where nothing is known of it.
        """
        try:
            yield
        except BaseException as error:
            if self.count == 1:
                raise
            ended = isinstance(error, SystemExit) and error.code == AGAIN  # told to end while there is nothing to save
            if not (ended or isinstance(error, known)):
                traceback.print_exc()
            lost = "if another host has ended, the same command, on all hosts, goes on from the last checkpoint: "
            reason = lost * isinstance(error, jax.errors.JaxRuntimeError) + str(error)
            print(f"host {self.index} of {self.count} ends: {type(error).__name__}: {reason}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            after = overran() if isinstance(error, jax.errors.JaxRuntimeError) else 0
            os._exit(2 if isinstance(error, known) else AGAIN if ended else after or 1)

    def check(self, workdir: Path, config: str, local: int) -> None:
        """Raises ValueError where hosts have other files, another config, or another number of devices than the first."""
        if self.count == 1:
            return
        mark = workdir / ".hosts"
        if self.first:
            mark.write_text(token := os.urandom(8).hex())
        token = self.gather(token if self.first else "")[0]
        there = self.gather(mark.is_file() and mark.read_text() == token)
        if self.first:
            mark.unlink()
        if not all(there):
            raise ValueError(
                f"{workdir}: host {there.index(False)} does not see what host 0 wrote there: put it on one that all see"
            )
        if len(set(self.gather(config))) > 1:
            raise ValueError("the hosts were started with different configs: give all of them the same command")
        if len(set(devices := self.gather(local))) > 1:
            raise ValueError(f"hosts must have as many devices each, got {devices}")


_MISSING = object()
ALONE = Hosts()
_SUMMED = ("_calls", "_reached", "tokens_per_s", "_s", "prefilled", "forked", "offloaded", "restarts", "/ahead", "_finished")


def _joined(name: str, values: list[Any]) -> float:
    if isinstance(values[0], list):
        return Mean(*(sum(column) for column in zip(*values, strict=True)))
    if name.endswith(("_max", "_min")):
        return max(values) if name.endswith("_max") else min(values)
    return sum(values) if name.endswith(_SUMMED) and not name.endswith("latency_s") else sum(values) / len(values)


# ---------------------------------------------------------------------- joining


def join() -> None:
    """Joins the other processes of the run, if there are any; before JAX has devices.

    They are told by JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID, or found by JAX
    itself under srun, under mpirun, and on the hosts of a TPU slice. Raises ValueError where only some of the three are there.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    told = {name: os.environ[name] for name in names if os.environ.get(name)}
    if told and len(told) < len(names):
        missing = ", ".join(name for name in names if name not in told)
        raise ValueError(f"several processes need {', '.join(names)}: {missing} is missing")
    known: dict[str, Any] = {}
    if told:
        if not (told[names[1]].isdecimal() and told[names[2]].isdecimal() and int(told[names[2]]) < int(told[names[1]])):
            raise ValueError(f"JAX_PROCESS_ID must be 0 to JAX_NUM_PROCESSES - 1, got {told[names[2]]} of {told[names[1]]}")
        known = {"coordinator_address": told[names[0]], "num_processes": int(told[names[1]]), "process_id": int(told[names[2]])}
    elif not _in_a_cluster():
        return
    if jax.distributed.is_initialized():
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    waits: dict[str, Any] = {"initialization_timeout": JOIN_S, "heartbeat_timeout_seconds": HEARTBEAT_S}
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    if main:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no handler of Python's is heard while the others are waited for
    try:
        jax.distributed.initialize(**known, **waits, shutdown_timeout_seconds=HEARTBEAT_S)
    except RuntimeError:  # devices exist already, as in a notebook on a TPU: they are used as they are
        if told:
            raise
    finally:
        if main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # JAX has taken it; None is no hearer of Python's


def _in_a_cluster() -> bool:
    """Whether JAX can find the other processes: several tasks of a SLURM step or of mpirun, or a TPU."""
    tasks = max(int(os.environ.get(name) or 1) for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    chips = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    wanted = os.environ.get("JAX_PLATFORMS", "") in ("", "tpu", "tpu,cpu")
    return tasks > 1 or (chips and wanted and importlib.util.find_spec("libtpu") is not None)


def here() -> Hosts:
    """This process among those that `join` found."""
    return Hosts(jax.process_index(), jax.process_count())


# ---------------------------------------------------------------------- arrays of one host


def check_mesh(mesh: DeviceMesh, hosts: Hosts) -> None:
    """Raises ValueError where a replica of the sampler, or a row, would be cut between hosts."""
    local, cut = mesh.mesh.size // hosts.count, mesh.size["tensor"] * mesh.size["context"]
    if mesh.mesh.size % hosts.count or local % cut:
        raise ValueError(
            f"mesh tensor={mesh.size['tensor']} x context={mesh.size['context']} must divide the devices of a host, which are "
            f"{mesh.mesh.size} / {hosts.count}: weights of the sampler and rows are not cut between hosts"
        )
    if mesh.mesh.size < jax.device_count() and hosts.count > 1:
        raise ValueError(f"several hosts must use all their {jax.device_count()} devices, the mesh has {mesh.mesh.size}")


def meet(mesh: DeviceMesh) -> None:
    """Has devices of several hosts that will talk to each other connect now, while all hosts are at the same place.

    On CPUs a connection is made by the first program that needs it, which gives up when a host is 30 s late, as it may be
    after it compiled.
    """
    axes = [name for name, size in mesh.size.items() if size > 1]
    for some in (c for n in range(1, len(axes) + 1) for c in itertools.combinations(axes, n)):
        total = jax.shard_map(
            partial(jax.lax.psum, axis_name=some),
            mesh=mesh.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        jax.block_until_ready(jax.jit(total)(jnp.ones(())))


def is_here(mesh: DeviceMesh) -> bool:
    """Whether a mesh is of this host's own devices."""
    return all(device.process_index == jax.process_index() for device in mesh.mesh.devices.flat)


def put_rows(tree: dict[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Rows on the mesh: where several hosts hold it, each puts its own, which follow each other by host."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in tree.items()}


def rows_here(x: jax.Array) -> np.ndarray:
    """The rows that `put_rows` put here."""
    if x.is_fully_addressable:
        return np.asarray(x)
    boxes = [shard.index[0].indices(x.shape[0])[:2] for shard in x.addressable_shards]
    first, last = min(start for start, _ in boxes), max(stop for _, stop in boxes)
    found = np.empty((last - first, *x.shape[1:]), x.dtype)
    for (start, stop), shard in zip(boxes, x.addressable_shards, strict=True):
        found[(slice(start - first, stop - first), *shard.index[1:])] = shard.data
    return found


def taken(x: jax.Array, names: tuple[str | None, ...], replica: DeviceMesh) -> jax.Array:
    """What a replica's devices hold of an array of all hosts, as an array of the replica's own: the same memory, no copy."""
    held = {shard.device: shard.data for shard in x.addressable_shards}
    parts = [held[device] for device in replica.mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(x.shape, replica.sharding(names, x.shape), parts)


def spread_fn(mesh: DeviceMesh, axes: Any, dtype: Any, replicas: Sequence[DeviceMesh]) -> Callable[[Any], Iterator[list[Any]]]:
    """What makes of the learner's weights those of this host's replicas, on meshes of their own devices: part after part.

    A part is a weight that is in no layer, {name: w}, or a layer, {"blocks": {name: w [1, ...]}}. A program of all hosts casts
    it and puts together what `fsdp`, `expert` and `context` cut; each host then takes its own shards for arrays of its own,
    without a copy, so that no later program of the engine waits for another host.

    Args:
        axes: the names of every weight's dimensions.
        dtype: to cast to before anything travels; None for weights that must be merged first.
    """

    def cast(w: Any) -> Any:
        return jax.tree.map(lambda x: x if dtype is None else x.astype(dtype), w)

    def whole(x: Any, names: tuple[str | None, ...]) -> NamedSharding:
        by_replica = replicas[0].spec(names, x.shape)
        return NamedSharding(mesh.mesh, PartitionSpec(*("tensor" if cut == "tensor" else None for cut in by_replica)))

    def parts(name: str, published: Any) -> list[Any]:  # nobody but who asked for them holds them
        return [{name: jax.tree.map(partial(taken, replica=replica), published, axes[name])} for replica in replicas]

    programs: dict[Any, Any] = {}

    def spread(params: Any) -> Iterator[list[Any]]:
        blocks = params["blocks"]
        if not programs:
            shardings = jax.tree.map(whole, params, axes)
            programs.update({name: jax.jit(cast, out_shardings=shardings[name]) for name in params if name != "blocks"})
            programs["blocks"] = jax.jit(lambda w, at: cast(layer_of(w, at)), out_shardings=shardings["blocks"])
        yield from (parts(name, programs[name](params[name])) for name in params if name != "blocks")
        yield from (parts("blocks", programs["blocks"](blocks, np.int32(at))) for at in range(layers_of(blocks)))

    return spread
