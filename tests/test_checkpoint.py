"""Checkpoints: all or nothing, onto whatever mesh there is, and a killed save leaves the one before."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxagent.algos.table import TABLE
from jaxagent.checkpoint import Checkpoints
from jaxagent.data.pack import Row, pack
from jaxagent.learner import Learner, LearnerOptions, OptimizerOptions
from jaxagent.models.transformer import logical_axes
from jaxagent.sharding import DeviceMesh

CONFIG = tiny.config()
FACTS = {"step": 3, "feed": {"drawn": 7, "tasks": {"next_index": 9}}, "results": {"before": {"success": 0.25}}}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    made = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield made
    made.close()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def weights(mesh: DeviceMesh, seed: int = 0) -> Any:
    params = tiny.params(CONFIG, seed)
    return jax.device_put(params, mesh.shardings(logical_axes(tiny.policy(CONFIG)), params))


def assert_equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))


def test_what_was_saved_comes_back_bit_for_bit_with_its_facts(checkpoints: Checkpoints) -> None:
    params = weights(tiny.mesh())
    odd = {"count": jnp.asarray(7, jnp.int32), "tiny": jnp.asarray([1e-42, -0.0, np.inf], jnp.float32)}
    checkpoints.save(3, {"params": params, "opt_state": odd}, FACTS)
    like = {"params": weights(tiny.mesh(), seed=1), "opt_state": jax.tree.map(jnp.zeros_like, odd)}
    assert checkpoints.latest() is None or checkpoints.latest() == 3  # it is saved in the background
    checkpoints.wait()
    assert checkpoints.latest() == 3
    assert checkpoints.facts(3) == FACTS
    restored = checkpoints.trees(3, like)
    assert_equal(restored, {"params": params, "opt_state": odd})
    assert np.signbit(restored["opt_state"]["tiny"][1])


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 1, 1), (1, 2, 2)])
def test_it_restores_onto_another_mesh(checkpoints: Checkpoints, shape: tuple[int, int, int]) -> None:
    params = weights(tiny.mesh(2, 2, 2))
    checkpoints.save(1, {"params": params}, FACTS)
    checkpoints.wait()
    like = weights(tiny.mesh(*shape), seed=1)
    restored = checkpoints.trees(1, {"params": like})["params"]
    assert_equal(restored, params)
    jax.tree.map(lambda got, want: np.testing.assert_equal(got.sharding, want.sharding), restored, like)


def test_one_tree_may_be_read_without_the_others(checkpoints: Checkpoints) -> None:
    params = weights(tiny.mesh())
    checkpoints.save(1, {"params": params, "opt_state": {"mu": params}}, FACTS)
    checkpoints.wait()
    assert_equal(checkpoints.trees(1, {"params": params})["params"], params)


def test_a_whole_learner_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(checkpoints: Checkpoints) -> None:
    tokens = tiny.tokens(CONFIG, 8).tolist()
    row = Row(tokens, [False, *[True] * 7], [-3.0] * 8, [1.0] * 8, [1.0] * 8, [1.0] * 8)
    (batch,) = pack([row], batch_rows=8, row_tokens=32)

    def learner() -> Learner:
        made = Learner(CONFIG, tiny.params(CONFIG), tiny.mesh(), TABLE["grpo"], LearnerOptions(batch_rows=8, row_tokens=32))
        made.begin(OptimizerOptions(lr=1e-2, warmup_steps=2), 4)
        return made

    def update(learner: Learner, times: int) -> None:
        for _ in range(times):
            learner.accumulate(batch)
            learner.apply()

    straight, stopped, resumed = learner(), learner(), learner()
    update(straight, 4)
    update(stopped, 2)
    checkpoints.save(2, stopped.state(), {"updates": stopped.updates})
    checkpoints.wait()
    resumed.restore(checkpoints.trees(2, resumed.state()), checkpoints.facts(2)["updates"])
    update(resumed, 2)
    assert resumed.updates == 4
    assert_equal(resumed.state(), straight.state())


def test_only_the_newest_are_kept(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoints.save(step, {"params": {"x": jnp.full(2, step)}}, {"step": step})
    checkpoints.wait()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_an_empty_folder_has_no_latest(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None


def test_saved_arrays_may_be_donated_at_once(checkpoints: Checkpoints) -> None:
    params = {"x": jnp.arange(1000.0)}
    checkpoints.save(1, {"params": params}, {})
    moved = jax.jit(lambda p: jax.tree.map(lambda x: x * 0 - 1, p), donate_argnums=0)(params)
    checkpoints.wait()
    np.testing.assert_array_equal(checkpoints.trees(1, {"params": moved})["params"]["x"], np.arange(1000.0))


def test_the_last_whole_step_is_read_from_the_disk_not_from_what_was_asked_for(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    assert checkpoints.whole() is None
    checkpoints.save(3, {"params": weights(tiny.mesh())}, FACTS)
    checkpoints.wait()
    (tmp_path / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir()
    assert checkpoints.whole() == 3


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with the checkpoints 1 and 2, and what is in both."""
    folder = tmp_path_factory.mktemp("two")
    trees = {"params": {name: jax.random.normal(jax.random.key(i), (1 << 12,)) for i, name in enumerate("abc")}}
    with closing(Checkpoints(folder, keep=2)) as saving:
        for step in (1, 2):
            saving.save(step, trees, {"step": step})
    return folder, trees


@pytest.mark.parametrize("part", ["params", "facts"])
@pytest.mark.parametrize("harm", ["cut", "changed", "lost"])
def test_a_damaged_checkpoint_is_named_with_the_one_to_go_on_from(
    two_saves: tuple[Path, Any], tmp_path: Path, harm: str, part: str
) -> None:
    folder, (saved, trees) = tmp_path / "checkpoints", two_saves
    shutil.copytree(saved, folder)
    files = [folder / "2/facts/metadata"] if part == "facts" else list((folder / "2/params/ocdbt.process_0/d").iterdir())
    file = max(files, key=lambda path: path.stat().st_size)
    whole = file.read_bytes()
    file.unlink() if harm == "lost" else file.write_bytes(whole[: len(whole) // 2] if harm == "cut" else bytes(len(whole)))
    with closing(Checkpoints(folder, keep=2)) as checkpoints:
        with pytest.raises(ValueError, match=f"^{folder}/2 cannot be read: .*; .* the run then goes on from {folder}/1$"):
            checkpoints.facts(2) if part == "facts" else checkpoints.trees(2, trees)
        assert checkpoints.facts(1) == {"step": 1}
        assert_equal(checkpoints.trees(1, trees), trees)
    shutil.rmtree(folder / "1")
    with closing(Checkpoints(folder, keep=2)) as alone, pytest.raises(ValueError, match=r"the run then begins anew$"):
        alone.facts(2) if part == "facts" else alone.trees(2, trees)


def test_a_disk_that_takes_no_more_is_told_as_the_fault_that_it_is_and_what_was_saved_stays(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """The words of the library that writes say the number of the fault."""
    checkpoints.save(1, {"params": {"x": jnp.arange(4.0)}}, {"step": 1})
    checkpoints.wait()
    big = {"params": {"x": jax.random.normal(jax.random.key(0), (1 << 18,))}}
    with files_of_at_most(1 << 16), pytest.raises(OSError, match="File too large") as caught:
        checkpoints.save(2, big, {"step": 2})
        checkpoints.wait()
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(tmp_path / "checkpoints")
    assert checkpoints.whole() == 1
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert again.latest() == 1
    again.save(2, big, {"step": 2})
    again.wait()
    assert_equal(again.trees(2, big), big)
    again.close()


def test_a_disk_that_takes_no_more_is_told_once_and_no_thread_writes_a_traceback(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        import jax
        from jaxagent.checkpoint import Checkpoints

        checkpoints = Checkpoints(Path(sys.argv[1]), keep=3)
        trees = {"params": {f"x{i}": jax.random.normal(jax.random.key(i), (1 << 12,)) for i in range(20)}}
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        try:
            checkpoints.save(1, trees, {"step": 1})
            checkpoints.wait()
        except OSError as error:
            print(error.strerror)
        checkpoints.close()
    """)
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("File too large\n", "")


def test_a_save_that_is_killed_leaves_the_one_before_loadable(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        import jax.numpy as jnp
        from jaxagent.checkpoint import Checkpoints

        checkpoints = Checkpoints(Path(sys.argv[1]), keep=3)
        checkpoints.save(1, {"params": {"x": jnp.arange(4.0)}}, {"step": 1})
        checkpoints.wait()
        checkpoints.save(2, {"params": {"x": jnp.zeros((64, 1 << 20))}}, {"step": 2})
        print("saving", flush=True)
        checkpoints.wait()
    """)
    folder = tmp_path / "checkpoints"
    with subprocess.Popen([sys.executable, "-c", program, folder], stdout=subprocess.PIPE) as saving:
        assert saving.stdout is not None
        assert saving.stdout.readline() == b"saving\n"
        os.kill(saving.pid, signal.SIGKILL)
    checkpoints = Checkpoints(folder, keep=3)
    try:
        latest = checkpoints.latest()
        assert latest in (1, 2)  # 2 only if it was whole
        restored = checkpoints.trees(1, {"params": {"x": jnp.zeros(4)}})
        np.testing.assert_array_equal(restored["params"]["x"], np.arange(4.0))
        assert checkpoints.facts(1) == {"step": 1}
        checkpoints.save(3, {"params": {"x": jnp.ones(4)}}, {"step": 3})
        checkpoints.wait()
        assert checkpoints.latest() == 3
    finally:
        checkpoints.close()
