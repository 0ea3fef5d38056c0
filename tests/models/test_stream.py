"""Weights on their way between files and devices: bit for bit, in shards, over meshes, and never many on the host at once."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import compilations
import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from checkpoints import KINDS, MESHES, STREAMED, assert_equal_bytes, edit, in_shards, tensors_of
from safetensors.numpy import load_file

from jaxagent.models import load, save
from jaxagent.models.transformer import logical_axes, params_of
from jaxagent.sharding import DeviceMesh


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


# ---------------------------------------------------------------------- shards


def test_a_checkpoint_in_shards_loads_like_one_file(kind: dict[str, Any], tmp_path: Path) -> None:
    policy = tiny.policy(tiny.config(**kind))
    save(policy, tmp_path)
    in_shards(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, params_of(policy)[1], params_of(load(tmp_path))[1])


def test_an_export_in_shards_holds_what_one_file_does(kind: dict[str, Any], tmp_path: Path) -> None:
    policy = tiny.policy(tiny.config(**kind))
    save(policy, tmp_path / "one", dtype="bfloat16")
    whole = load_file(tmp_path / "one" / "model.safetensors")
    largest, total = max(x.nbytes for x in whole.values()), sum(x.nbytes for x in whole.values())
    save(policy, tmp_path / "many", dtype="bfloat16", max_shard_bytes=largest)
    assert_equal_bytes(tensors_of(tmp_path / "many"), whole)

    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert index["metadata"]["total_size"] == total
    assert count >= total / largest and files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert {file.name for file in (tmp_path / "many").iterdir()} == {*files, "config.json", "model.safetensors.index.json"}
    for file in files:
        held = load_file(tmp_path / "many" / file)
        assert sum(x.nbytes for x in held.values()) <= largest
        assert {name for name, place in index["weight_map"].items() if place == file} == held.keys()
    loaded = load(tmp_path / "many")
    jax.tree.map(np.testing.assert_array_equal, params_of(load(tmp_path / "one"))[1], params_of(loaded)[1])


def test_a_tensor_larger_than_a_shard_has_a_file_of_its_own(tmp_path: Path) -> None:
    policy = tiny.policy(tiny.config())
    save(policy, tmp_path, max_shard_bytes=1)
    count = len(tensors_of(tmp_path))
    assert len(list(tmp_path.glob(f"model-*-of-{count:05d}.safetensors"))) == count
    jax.tree.map(np.testing.assert_array_equal, params_of(policy)[1], params_of(load(tmp_path))[1])


def test_an_export_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    policies = [tiny.policy(tiny.config(), seed) for seed in (1, 2, 3)]
    for policy, limit in zip(policies, (2000, 4000, 10**9), strict=True):
        save(policy, tmp_path, max_shard_bytes=limit)
        files = list(tmp_path.glob("*.safetensors"))
        assert sum(len(load_file(file)) for file in files) == len(tensors_of(tmp_path))
        jax.tree.map(np.testing.assert_array_equal, params_of(policy)[1], params_of(load(tmp_path))[1])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_an_export_that_fails_midway_leaves_the_one_before_whole(tmp_path: Path) -> None:
    save(tiny.policy(tiny.config(), seed=1), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    broken = tiny.policy(tiny.config(), seed=2)
    broken.blocks.down[...].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        save(broken, tmp_path, max_shard_bytes=2000)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


# ---------------------------------------------------------------------- dtypes


def test_tensors_of_several_dtypes_in_several_files_keep_their_values(tmp_path: Path) -> None:
    for name, sizes in {"tiny": {}, "streamed": STREAMED}.items():
        path = tmp_path / name
        save(tiny.policy(tiny.config(**sizes)), path)
        kinds = (np.float32, ml_dtypes.bfloat16, np.float16)
        mixed = {key: x.astype(kinds[i % 3]) for i, (key, x) in enumerate(load_file(path / "model.safetensors").items())}
        in_shards(path, mixed)
        for mesh in (None, DeviceMesh.build(**MESHES["fsdp 8"])):
            save(load(path, mesh), path / "again")
            again = load_file(path / "again" / "model.safetensors")
            assert_equal_bytes({key: x.astype(mixed[key].dtype) for key, x in again.items()}, mixed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [{"vocab_size": 500}, {"vocab_size": 500, "width": 144}], ids=["on the host", "streamed"])
def test_every_finite_number_survives_the_way_through_float32(dtype: str, sizes: dict[str, int], tmp_path: Path) -> None:
    save(tiny.policy(tiny.config(**sizes)), tmp_path / "first", dtype=dtype)
    table = load_file(tmp_path / "first" / "model.safetensors")["model.embed_tokens.weight"]
    patterns = np.arange(2**16, dtype=np.uint16).view(table.dtype)
    patterns = patterns[np.isfinite(patterns.astype(np.float32))]  # subnormal numbers and both zeros among them
    for part in range(math.ceil(patterns.size / table.size)):
        numbers = np.resize(patterns[part * table.size :], table.shape)
        edit(tmp_path / "first", {"model.embed_tokens.weight": numbers})
        save(load(tmp_path / "first"), tmp_path / "second", dtype=dtype)
        first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
        assert_equal_bytes(second, first)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_may_be_loaded_in_a_narrower_dtype(dtype: str, kind: dict[str, Any], tmp_path: Path) -> None:
    policy = tiny.policy(tiny.config(**kind))
    save(policy, tmp_path)
    narrow = params_of(load(tmp_path, dtype=dtype))[1]
    jax.tree.map(lambda x, wide: np.testing.assert_array_equal(x, wide.astype(dtype)), narrow, params_of(policy)[1])
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {np.dtype(getattr(ml_dtypes, dtype, dtype))}


def test_a_dtype_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    policy = tiny.policy(tiny.config())
    save(policy, tmp_path)
    for attempt in (lambda: load(tmp_path, dtype="int8"), lambda: save(policy, tmp_path, dtype="int8")):
        with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
            attempt()


# ---------------------------------------------------------------------- meshes and memory


@pytest.mark.parametrize("mesh", MESHES.values(), ids=list(MESHES))
@pytest.mark.parametrize("sizes", [{"width": 32, "ffn_width": 32, "heads": 8}, STREAMED], ids=["tiny", "streamed"])
def test_a_mesh_holds_what_one_device_holds_and_every_shard_lies_where_the_table_says(
    sizes: dict[str, int], mesh: dict[str, int], tmp_path: Path
) -> None:
    sizes = {**sizes, "kv_heads": 2} if mesh.get("tensor") == 4 else sizes
    policy = tiny.policy(tiny.config(**sizes, tied_head=False))
    save(policy, tmp_path / "one", dtype="bfloat16")
    place = DeviceMesh.build(**mesh)
    loaded = load(tmp_path / "one", place)
    alone, spread = params_of(load(tmp_path / "one"))[1], params_of(loaded)[1]
    jax.tree.map(np.testing.assert_array_equal, alone, spread)
    wanted = place.shardings(logical_axes(policy), alone)

    def check(x: jax.Array, whole: jax.Array, sharding: jax.sharding.NamedSharding) -> None:
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
        where = sharding.devices_indices_map(x.shape)
        assert len(x.addressable_shards) == 8
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(whole)[where[shard.device]])

    jax.tree.map(check, spread, alone, wanted)
    save(loaded, tmp_path / "again", dtype="bfloat16")
    assert_equal_bytes(*(load_file(tmp_path / name / "model.safetensors") for name in ("again", "one")))


def test_a_mesh_that_cannot_cut_the_weights_is_refused(tmp_path: Path) -> None:
    save(tiny.policy(tiny.config()), tmp_path)
    with pytest.raises(ValueError, match=r"dimension 'heads' of 4 cannot be cut by mesh tensor=8"):
        load(tmp_path, DeviceMesh.build(data=1, tensor=8))


@pytest.mark.parametrize("mesh", [None, {"data": 1, "fsdp": 4, "tensor": 2}], ids=["one device", "eight devices"])
def test_loading_and_saving_hold_little_more_than_the_largest_file_on_the_host(
    mesh: dict[str, int] | None, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 4096, "width": 512, "heads": 8, "kv_heads": 4, "head_width": 64, "ffn_width": 2048, "layers": 5}
    place = mesh and DeviceMesh.build(**mesh)
    save(tiny.policy(tiny.config(**sizes)), tmp_path / "first", dtype="bfloat16", max_shard_bytes=2**22)
    files = [file.stat().st_size for file in (tmp_path / "first").glob("*.safetensors")]
    assert sum(files) > 9 * max(files)
    policy = load(tmp_path / "first", place)  # what compiling holds is not of interest
    save(policy, tmp_path / "second", dtype="bfloat16", max_shard_bytes=2**22)
    tracemalloc.start()
    try:
        policy = load(tmp_path / "first", place)
        loading = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        save(policy, tmp_path / "second", dtype="bfloat16", max_shard_bytes=2**22)
        saving = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert max(files) / 8 < loading < 1.2 * max(files)  # the lower bound: numpy's buffers are seen
    assert saving < 1.2 * max(files)
    assert_equal_bytes(*(tensors_of(tmp_path / name) for name in ("second", "first")))


def test_loading_a_second_model_of_a_shape_compiles_nothing(tmp_path: Path) -> None:
    save(tiny.policy(tiny.config(**STREAMED)), tmp_path)
    mesh = DeviceMesh.build(**MESHES["fsdp 8"])
    load(tmp_path, mesh)
    before = len(compilations.compiled)
    load(tmp_path, DeviceMesh.build(**MESHES["fsdp 8"]))
    assert len(compilations.compiled) == before > 0
