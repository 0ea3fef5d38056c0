"""What a run is made of: its sandboxes, which may be servers elsewhere, one or many."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from flax import nnx
from ml_collections import ConfigDict
from scripted import ScriptedSampler
from test_rollout import PLAIN, SAMPLING, drawing, facts, many_tasks, rows_of

from jaxagent.agent import Agent, Limits
from jaxagent.config import load
from jaxagent.envs.chain import Chain
from jaxagent.models.transformer import Decoder, logical_axes
from jaxagent.parts import Parts, Sandbox, build, puts_together, spread_weights
from jaxagent.rollout import RolloutOptions, Rollouts
from sandbox_client import EmbeddedServer

BASE = str(Path(__file__).parents[1] / "configs" / "base.py")
TASKS, GROUP = 8, 4


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet") / "token"


@pytest.fixture(scope="module")
def servers(token_file: Path) -> Iterator[tuple[EmbeddedServer, EmbeddedServer]]:
    with (
        EmbeddedServer(functions=(Chain.functions,), code="off", token_file=token_file) as one,
        EmbeddedServer(functions=(Chain.functions,), code="off", token_file=token_file) as two,
    ):
        yield one, two


def section(*overrides: str) -> ConfigDict:
    config, found = load(BASE, [f"sandbox.{override}" for override in overrides])
    assert found == []
    return config.sandbox


@contextmanager
def sandbox(world: Any, *overrides: str) -> Iterator[Sandbox]:
    made = Sandbox(section(*overrides), world, None)
    try:
        yield made
    finally:
        made.close()


def played(*overrides: str) -> tuple[list[Any], list[int]]:
    """The rows of many episodes, and how often each server has answered."""
    world = Chain()
    with sandbox(world, *overrides) as place:
        agent = Agent(PLAIN, world.tools, ScriptedSampler(PLAIN, drawing), Limits(max_turns=8, max_tokens=100))
        many = Rollouts(world, agent, place.client, seed=11, options=RolloutOptions(concurrency=8))
        try:
            rows = rows_of(many.play(many_tasks(world, TASKS), GROUP, SAMPLING))
            return [facts(row) for row in rows], [e.breaker.answered for e in many._sandbox._caller.endpoints]
        finally:
            many.close()


def test_a_rollout_over_two_servers_equals_one_over_one_server(
    servers: tuple[EmbeddedServer, EmbeddedServer], token_file: Path, tmp_path: Path
) -> None:
    one, two = servers
    alone, _ = played(f"url={one.url}", f"token_file={token_file}")
    assert len(alone) == TASKS * GROUP
    both, answered = played(f"url={one.url}, {two.url}/", f"token_file={token_file}")
    assert both == alone
    assert len(answered) == 2 and min(answered) > 4  # each has had its share
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(f'backend = "v1"\nurls = ["{one.url}", "{two.url}"]\ntoken = {{ file = "{token_file}" }}\n')
    from_file, answered = played(f"url={fleet}")
    assert from_file == alone and min(answered) > 4


def test_a_fleet_one_of_whose_servers_is_silent_runs_and_says_so(
    servers: tuple[EmbeddedServer, EmbeddedServer], token_file: Path
) -> None:
    nobody = "http://127.0.0.1:9"
    given = f"url={servers[0].url},{nobody}", f"token_file={token_file}", "timeout_s=0.5"
    with sandbox(Chain(), *given) as place:
        assert place.description == f"sandbox {servers[0].url}, {nobody}; no answer from {nobody}"
    with pytest.raises(ValueError, match=f"sandbox.url={nobody}: no sandbox server answers there"):
        Sandbox(section(f"url={nobody},http://127.0.0.1:7", f"token_file={token_file}", "timeout_s=0.5"), Chain(), None)


def test_every_server_of_a_fleet_must_be_fit_for_the_run(
    servers: tuple[EmbeddedServer, EmbeddedServer], token_file: Path
) -> None:
    with (
        EmbeddedServer(functions=("jaxagent.envs.maze",), code="off", token_file=token_file) as other,
        pytest.raises(ValueError, match=f"sandbox.url={other.url}: the server does not hold the functions of jaxagent"),
    ):
        Sandbox(section(f"url={servers[0].url},{other.url}", f"token_file={token_file}"), Chain(), None)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "wanted a fleet file, TOML: No such file or directory"),
        ("backend =", "wanted a fleet file, TOML: "),
        ('backend = "v1"\nurl = "ftp://a"', "got 'ftp://a'"),
        ('backend = "sandbox_fusion"\nurl = "http://a"', "sandbox_fusion has no sessions, which this world needs"),
        ('backend = "swe_rex"\nurl = "http://a"', "swe_rex has no functions, which this world needs"),
    ],
)
def test_a_fleet_that_cannot_serve_the_world_is_told_before_anything_runs(tmp_path: Path, text: str | None, what: str) -> None:
    path = tmp_path / "fleet.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"sandbox\.url=") as error:
        Sandbox(section(f"url={path}"), Chain(), None)
    assert what in str(error.value)


def test_episodes_whose_seats_could_wait_for_each_other_for_ever_are_refused() -> None:
    spec = str(Path(__file__).parents[1] / "configs" / "kuhn.py")
    with pytest.raises(ValueError, match=r"Set rollout\.concurrency to 16 or less, engine\.slots to 64, or engine\.offload"):
        build(load(spec, ["rollout.concurrency=32"])[0])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mesh.tensor=2"], "mesh.tensor=2: earlier versions of the policy play in the world kuhn"),
        (["finetune.mode=search"], "finetune.mode=search has turns taken again, .* earlier versions of the policy too"),
        (["feed.branches=2", "env.options.past=0.0"], "feed.branches=2 has turns taken again, .* kuhn 2 seats play"),
    ],
)
def test_what_cannot_be_done_with_several_players_is_refused_before_anything_is_built(overrides: list[str], said: str) -> None:
    spec = str(Path(__file__).parents[1] / "configs" / "kuhn.py")
    with pytest.raises(ValueError, match=said):
        build(load(spec, overrides)[0])


def test_weights_that_a_mesh_cuts_for_storage_are_cast_before_they_travel_to_the_engines() -> None:
    mesh, decoder = tiny.mesh(fsdp=2), tiny.config(layers=1)
    axes, params = logical_axes(nnx.eval_shape(lambda: Decoder(decoder, nnx.Rngs(0)))), tiny.params(decoder)
    places = list(mesh.replicas())
    cut = jax.tree.map(jax.device_put, params, mesh.shardings(axes, params))
    parts = list(spread_weights(decoder, "bfloat16", mesh, places)(cut))
    for own, place in zip(zip(*parts, strict=True), places, strict=True):
        assert {leaf.devices() == set(place.mesh.devices.flat) for leaf in jax.tree.leaves(own)} == {True}
    for own in tiny.put_together(parts):
        assert jax.tree.all(jax.tree.map(lambda new, w: bool((new == w.astype(jnp.bfloat16)).all()), own, params))
        assert {leaf.dtype.name for leaf in jax.tree.leaves(own)} == {"bfloat16"}
    assert puts_together(mesh, 1) and not puts_together(tiny.mesh(data=2), 1) and puts_together(tiny.mesh(tensor=2), 2)


@pytest.mark.parametrize(("platform", "devices", "together"), [("cpu", 1, True), ("gpu", 1, False), ("cpu", 2, False)])
def test_engines_and_learner_run_their_first_programs_together_only_where_they_may(
    platform: str, devices: int, together: bool
) -> None:
    done, taught = threading.Event(), threading.Event()

    class Engines:
        engines = (SimpleNamespace(devices=devices),)

        def publish(self, params: Any, version: int) -> None: ...

        def warm_up(self) -> None:
            assert taught.wait(60 if together else 0.2) == together
            done.set()

    class Teaching:
        mesh, params, scores = SimpleNamespace(platform=platform), None, False

        def warm_up(self, *, scores: bool) -> None:
            assert taught.is_set() or done.is_set() == (not together)
            self.scores = scores
            taught.set()

    for critic, scores, kl in ((None, False, False), (Teaching(), False, False), (None, True, False), (None, False, True)):
        done.clear(), taught.clear()
        learner, algorithm = Teaching(), SimpleNamespace(kl_in_loss=kl, kl_in_reward=False)
        parts: Any = Parts(None, None, None, algorithm, learner, critic, None, Engines(), None, None)  # type: ignore[arg-type]
        parts.compile(scores=scores)
        assert learner.scores == (scores or kl) and (critic is None or critic.scores)
