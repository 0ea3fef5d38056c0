"""The engines of a run as one: who is held while the learner has the devices, and when they are free."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxagent.engine.engine import Engine, EngineOptions
from jaxagent.engine.publish import Publish
from jaxagent.engine.replicas import Replicas
from jaxagent.hosts import spread_fn
from jaxagent.models.adapters import lora_spec
from jaxagent.models.lora import LoraSpec
from jaxagent.models.transformer import Decoder, Params, logical_axes
from jaxagent.topology import size_bytes
from jaxagent.types import SampleRequest


@contextmanager
def engines(tensor: int, spread: Callable[[Params], Iterable[Sequence[Params]]] | None = None) -> Iterator[Replicas]:
    """Two engines that hold no weights and sample nothing."""
    options = EngineOptions(slots=1, slot_tokens=16, chunk=16)
    made = Replicas([Engine(tiny.config(), options, place) for place in tiny.mesh(data=2, tensor=tensor).replicas()], spread)
    try:
        yield made
    finally:
        made.close()


def test_engines_of_several_devices_make_no_call_while_they_are_held() -> None:
    with engines(tensor=2) as replicas:
        done: list[int] = []
        with replicas.hold():
            futures = [engine.post(lambda: done.append(1)) for engine in replicas.engines]
            time.sleep(0.05)
            assert not done
        for future in futures:
            future.result(timeout=60)
        assert len(done) == 2


def test_engines_of_one_device_are_not_held() -> None:
    with engines(tensor=1) as replicas, replicas.hold():
        for engine in replicas.engines:
            engine.post(lambda: None).result(timeout=60)


def test_what_fails_while_engines_are_held_lets_them_go() -> None:
    with engines(tensor=2) as replicas:
        with pytest.raises(ZeroDivisionError), replicas.hold():
            _ = 1 / 0
        for engine in replicas.engines:
            engine.post(lambda: None).result(timeout=60)


def test_engines_without_anything_to_decode_leave_the_devices_free() -> None:
    with engines(tensor=1) as replicas:
        deadline = time.monotonic() + 60
        while not replicas.idle() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert replicas.idle()


def test_an_engine_that_cannot_be_held_lets_the_others_go() -> None:
    with engines(tensor=2) as replicas:
        replicas.engines[1].close()
        with pytest.raises(RuntimeError, match="closed"), replicas.hold():
            raise AssertionError("nobody is held")
        replicas.engines[0].post(lambda: None).result(timeout=60)


@pytest.mark.parametrize("tensor", [1, 2])
def test_weights_are_spread_while_no_engine_makes_a_call(tensor: int) -> None:
    called: list[int] = []

    def spread(params: Params) -> list[Sequence[Params]]:
        replicas.engines[0].post(lambda: called.append(1))
        time.sleep(0.05)
        raise ZeroDivisionError(f"{len(called)} calls meanwhile")

    with engines(tensor=tensor, spread=spread) as replicas, pytest.raises(ZeroDivisionError, match="0 calls meanwhile"):
        replicas.publish({}, version=1)


def test_what_a_call_in_flight_has_raised_is_raised_by_who_would_hold_the_engines() -> None:
    with engines(tensor=2) as replicas:

        def lost() -> None:
            raise MemoryError("of the call in flight")

        replicas.engines[1]._read_flight = lost  # type: ignore[method-assign]
        with pytest.raises(MemoryError, match="in flight"), replicas.hold():
            raise AssertionError("held")
        replicas.engines[0].run(lambda: None)  # it goes on


@pytest.mark.parametrize("lora", [None, lora_spec(2)], ids=["weights", "adapters"])
def test_weights_come_a_part_at_a_time_and_are_those_that_one_device_makes(lora: LoraSpec | None) -> None:
    decoder, options = tiny.config(layers=3, lora=lora), EngineOptions(slots=1, slot_tokens=16, chunk=16)
    params, axes = tiny.params(decoder), logical_axes(nnx.eval_shape(lambda: Decoder(decoder, nnx.Rngs(0))))
    mesh = tiny.mesh(fsdp=2)
    places, sizes = list(mesh.replicas()), []
    spread = spread_fn(mesh, axes, None, places)

    def watched(cut: Params) -> Iterator[Sequence[Params]]:
        parts, before = spread(cut), []
        while each := next(parts, None):
            assert all(part() is None for part in before), "the part before is still there"
            sizes.append(size_bytes(each[0]))
            before = [weakref.ref(leaf) for leaf in jax.tree.leaves(each)]
            yield each
            del each

    replicas = Replicas([Engine(decoder, options, place) for place in places], watched)
    try:
        replicas.publish(jax.tree.map(jax.device_put, params, mesh.shardings(axes, params)), version=7)
        want = Publish(decoder, jnp.dtype("float32"), places[0])(params)
        for engine in replicas.engines:
            assert engine._version == 7
            jax.tree.map(np.testing.assert_array_equal, engine._params, want)
    finally:
        replicas.close()
    layer = size_bytes(params["blocks"]) // 3
    assert sizes[-3:] == [layer] * 3 and max(sizes[:-3]) == size_bytes(params["embed"])


def test_mates_follow_each_other_and_a_group_is_forgotten_with_the_last_of_them() -> None:
    with engines(tensor=1) as replicas:
        prompt = tuple(range(replicas.engines[0].options.fork_min_tokens))

        def settle(trajectory: str, group: str) -> None:
            replicas._settle(SampleRequest(trajectory, prompt, 0, (0, 0), (), group=group))

        for group in "abc":
            for mate in "12":
                settle(group + mate, group)
        homes = {trajectory: home for trajectory, (home, _) in replicas._home.items()}
        assert all(homes[group + "1"] == homes[group + "2"] for group in "abc")
        assert set(homes.values()) == {0, 1}
        for trajectory in ("a1", "b1", "b2", "b2", "unknown"):  # somebody is here all the time
            replicas.release(trajectory)
        assert set(replicas._groups) == set(replicas._mates) == {"a", "c"}
        assert sum(replicas._load.values()) == len(replicas._home) == 3
