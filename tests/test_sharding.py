"""Meshes: their shapes, what they refuse, their replicas, and where the table puts each dimension."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from jaxagent.models.transformer import logical_axes
from jaxagent.sharding import RULES, DeviceMesh


@pytest.mark.parametrize(
    ("asked", "shape"),
    [((0, 1, 1), (8, 1, 1)), ((0, 2, 2), (2, 2, 2)), ((1, 1, 1), (1, 1, 1)), ((2, 1, 2), (2, 1, 2)), ((0, 8, 1), (1, 8, 1))],
)
def test_data_zero_takes_the_devices_that_are_left(asked: tuple[int, int, int], shape: tuple[int, int, int]) -> None:
    size = DeviceMesh.build(*asked).size
    assert (size["data"], size["fsdp"], size["tensor"]) == shape


@pytest.mark.parametrize("asked", [(0, 3, 1), (0, 1, 16), (3, 4, 1), (16, 1, 1)])
def test_a_mesh_that_does_not_fit_the_devices_is_refused_with_its_numbers(asked: tuple[int, int, int]) -> None:
    data, fsdp, tensor = asked
    with pytest.raises(ValueError, match=f"data={data} x fsdp={fsdp} x tensor={tensor} does not fit 8 devices"):
        DeviceMesh.build(*asked)


@pytest.mark.parametrize("asked", [(0, 0, 1), (0, 1, 0), (-1, 1, 1)])
def test_axes_below_one_are_refused(asked: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DeviceMesh.build(*asked)


def test_there_is_a_replica_for_every_cut_but_that_of_tensor() -> None:
    mesh = DeviceMesh.build(2, 2, 2)
    replicas = list(mesh.replicas())
    assert [replica.mesh.devices.shape for replica in replicas] == [(1, 1, 1, 1, 2)] * 4
    everyone = [device for replica in replicas for device in replica.mesh.devices.flat]
    assert everyone == list(mesh.mesh.devices.flat)


def test_every_named_dimension_of_a_decoder_has_a_rule() -> None:
    names = {name for axes in jax.tree.leaves(logical_axes(tiny.policy(tiny.config()))) for name in [axes]}
    assert names <= set(RULES)
    mesh = DeviceMesh.build(2, 2, 2)
    assert mesh.sharding(("rows", None)).spec == PartitionSpec(("data", "fsdp", "expert"), None)
    assert mesh.sharding(("vocab", "embed")).spec == PartitionSpec("tensor", ("fsdp", "expert", "context"))
    assert mesh.sharding().spec == PartitionSpec()


def test_weights_are_cut_as_the_table_says_and_come_back_whole() -> None:
    mesh, policy = DeviceMesh.build(2, 2, 2), tiny.policy(tiny.config())
    whole = tiny.params(tiny.config())
    placed = jax.device_put(whole, mesh.shardings(logical_axes(policy), whole))
    q = placed["blocks"]["q"]  # layers, embed, heads, head
    assert q.addressable_shards[0].data.shape == (2, 16 // 2, 4 // 2, 8)
    jax.tree.map(np.testing.assert_array_equal, whole, jax.device_get(placed))


def test_a_tree_is_placed_by_one_rule() -> None:
    placed = DeviceMesh.build(4, 1, 2).place({"a": np.arange(16).reshape(8, 2)}, ("rows",))
    assert placed["a"].addressable_shards[0].data.shape == (2, 2)
    np.testing.assert_array_equal(placed["a"], np.arange(16).reshape(8, 2))


def test_a_weight_that_cannot_be_cut_evenly_is_named() -> None:
    policy = tiny.policy(tiny.config(heads=6, kv_heads=3))
    with pytest.raises(ValueError, match=r"blocks\.k: dimension 'kv_heads' of 3 cannot be cut by mesh tensor=2"):
        DeviceMesh.build(1, 1, 2).check(tiny.params(policy.config), logical_axes(policy))
    DeviceMesh.build(1, 2, 1).check(tiny.params(policy.config), logical_axes(policy))


def test_key_heads_fewer_than_the_tensor_axis_is_long_are_replicated() -> None:
    policy, mesh = tiny.policy(tiny.config(kv_heads=2)), DeviceMesh.build(1, 1, 4)
    mesh.check(tiny.params(policy.config), logical_axes(policy))
    placed = jax.device_put(tiny.params(policy.config), mesh.shardings(logical_axes(policy), tiny.params(policy.config)))
    assert placed["blocks"]["k"].addressable_shards[0].data.shape == placed["blocks"]["k"].shape
    assert placed["blocks"]["q"].addressable_shards[0].data.shape[2] == 1


def test_a_cache_of_fewer_key_heads_than_the_tensor_axis_is_long_is_placed_whole() -> None:
    placed = DeviceMesh.build(1, 1, 4).place({"fewer": np.zeros((3, 2, 8)), "enough": np.zeros((3, 4, 8))}, (None, "kv_heads"))
    assert placed["fewer"].addressable_shards[0].data.shape == (3, 2, 8)
    assert placed["enough"].addressable_shards[0].data.shape == (3, 1, 8)
