"""A plan says what a run would be: what shapes tell is what XLA counts, what cannot fit is refused in a sentence."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import compilations
import jax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from jaxagent import config as configs
from jaxagent.__main__ import main as command
from jaxagent.algos.table import choose
from jaxagent.compiled import Collective, collectives
from jaxagent.estimates import gradient_temporaries
from jaxagent.learner import Learner, LearnerOptions
from jaxagent.models.transformer import Decoder, params_of
from jaxagent.plan import Shapes, compiled, does_not_fit, forecast, held_bytes, iteration, lines, measures, peaks
from jaxagent.sharding import DeviceMesh
from jaxagent.topology import CHIPS, EngineShapes, linked_bytes, roofline_s, size_bytes, uncached

CONFIGS = Path(__file__).parents[1] / "configs"
SPEC = f"{CONFIGS / 'quickstart.py'}:runlocal"
SMALL = (
    "model.layers=1",
    "learner.batch_rows=8",
    "mesh.fsdp=2",
    "mesh.tensor=1",
    "model.width=64",
    "model.heads=2",
    "model.ffn_width=128",
)
BIG = ("model.width=16384", "model.layers=96", "model.heads=128", "model.head_width=128", "model.ffn_width=65536")


def configured(*overrides: str) -> ConfigDict:
    tree, faults = configs.load(SPEC, [*SMALL, *overrides])
    assert faults == []
    return tree


@pytest.fixture(scope="module")
def run() -> Shapes:
    return Shapes(configured("algo.kl=k3_loss", "algo.kl_coef=0.001", "mesh.data=1"))


def test_what_shapes_tell_is_what_xla_counts_and_the_most_at_once_is_within_a_tenth(run: Shapes) -> None:
    told = forecast(run, 60.0)
    held, o = told["held_bytes"], run.learner.options
    batch = 4 * o.batch_rows * o.row_tokens // 2 * len(run.learner.objective.reads)  # of a device, flags smaller than that
    learner, engine = run.learner.lower(), run.engine.lower()
    gradient = learner["accumulate"].compile().memory_analysis()
    there = held["weights"] + held["gradient sum"]
    assert there < gradient.argument_size_in_bytes < 1.01 * there + batch
    append = engine["append"].compile().memory_analysis()
    decode = engine["decode"].compile({"xla_backend_optimization_level": 0}).memory_analysis()
    there = held["sampler copy"] + held["key-value cache"] + held["rows"]
    assert abs(decode.argument_size_in_bytes / there - 1) < 0.02
    needed = {
        "gradient": gradient.temp_size_in_bytes,
        "update": learner["apply"].compile().memory_analysis().temp_size_in_bytes,
        "publish": told["temporary_bytes"]["publish"],
        "append": append.temp_size_in_bytes,
        "decode": decode.temp_size_in_bytes,
    }
    for phase, most in peaks(held, needed, **run.overlap).items():
        assert 0.9 < told["peak_bytes"][phase] / most < 1.1, (phase, told["temporary_bytes"], needed)


def test_every_weight_is_counted_on_the_device_that_holds_it(run: Shapes) -> None:
    """fsdp 2 halves what is trained; the sampler has all of it, and a slot's keys and values are L 2 S K H numbers."""
    held, c = held_bytes(run), run.decoder
    shapes = jax.tree.leaves(run.learner.params)
    cut = sum(x.size for x in shapes if x.sharding.shard_shape(x.shape) != x.shape)
    whole = sum(x.size for x in shapes)
    assert cut > 0.9 * whole
    assert held["weights"] == 4 * (whole - cut // 2) == held["reference"]
    assert held["moments"] - 2 * held["weights"] in range(64)  # and a count of steps
    assert held["sampler copy"] == 4 * whole
    assert held["key-value cache"] == 32 * c.layers * 2 * 80 * c.kv_heads * c.head_width * 4


def test_an_iteration_is_counted_by_its_budgets(run: Shapes) -> None:
    counted = forecast(run, 2.0)["iteration"]
    assert counted["episodes"] == 8 and counted["optimizer_steps"] == 2
    assert counted["sampled_tokens"] == 8 * 8 * 6 and counted["sandbox_calls"] == 8 * 8
    assert counted["packed_rows"] == 8 and counted["micro_batches"] == 2  # four rows for each optimizer step
    assert counted["sandbox_cores"] == pytest.approx((8 * 0.00454 + 64 * 0.0006) / 2, abs=0.01)


def test_a_critic_costs_its_weights_moments_and_sums_and_scores_are_a_program() -> None:
    runs = [Shapes(configured("mesh.data=1", f"algo.name={name}")) for name in ("grpo", "ppo_turn")]
    plain, ppo = (forecast(run, 60.0) for run in runs)
    assert not plain["held_bytes"]["critic"]
    own = sum(plain["held_bytes"][part] for part in ("weights", "moments", "gradient sum"))
    c = runs[1].decoder
    instead = 16 * (c.vocab_size * c.width // 2 - c.width)  # of a head for the vocabulary, cut in two, a vector on each
    assert abs(own - ppo["held_bytes"]["critic"] - instead) < 512  # of the sums for metrics
    assert ppo["programs"]["all"] == plain["programs"]["all"] + 6


def test_the_peak_is_of_what_stays_and_what_a_phase_adds() -> None:
    held = {"weights": 4, "gradient sum": 3, "sampler copy": 2}
    temporaries = {"gradient": 10, "update": 20, "publish": 30, "append": 5, "decode": 7}
    assert peaks(held, temporaries) == {"gradient": 19, "update": 29, "publish": 36, "sampling": 13}
    assert peaks(held, temporaries, streamed=True)["sampling"] == 16
    assert peaks(held, temporaries, ahead=True) == {"gradient": 26, "update": 36, "publish": 36, "sampling": 13}


def test_the_config_json_of_a_checkpoint_is_enough(tmp_path: Path) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_key_value_heads": 2, **sizes}))
    tree, faults = configs.load(f"{CONFIGS / 'questions.py'}:runlocal", [f"init_from={tmp_path}", "mesh.data=1"])
    assert faults == []
    qkv = 64 * 64 + 2 * 64 * 32 + 64 + 2 * 32
    layer = qkv + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert forecast(Shapes(tree), 60.0)["weights"] == 2 * 320 * 64 + 64 + 2 * layer


def test_programs_of_the_engine_are_counted_on_from_two_depths() -> None:
    """What is continued in a straight line is what the compiler says of all layers."""
    run = Shapes(configured("mesh.data=1", "model.layers=4"))
    told, whole = (measures(run, depths)["append"]() for depths in ((2, 3), ()))
    assert told["from_layers"] == [2, 3] and "from_layers" not in whole
    assert told["argument_bytes"] == whole["argument_bytes"]
    assert told["runs"] == whole["runs"] == {}
    for counted in ("temporary_bytes", "bytes_with_loops_once"):
        assert told[counted] == pytest.approx(whole[counted], rel=0.01)
    with pytest.raises(ValueError, match="two different depths from 2 on"):
        measures(run, (1, 2))
    with pytest.raises(ValueError, match="layers of two kinds"):
        replaced = replace(run.decoder, sliding=(True, False, True, False), window=4)
        EngineShapes(replaced, run.engine_options, run.replicas[0], run.learner.params).shallow(2)


def test_published_weights_are_counted_where_they_are_other_arrays_than_the_learners() -> None:
    cut = Shapes(configured("mesh.data=1", "engine.dtype=bfloat16"))  # fsdp 2 puts them together, in bf16
    c = cut.decoder
    layer = c.width * (2 * c.heads + 2 * c.kv_heads) * c.head_width + 3 * c.width * c.ffn_width + 2 * c.width + 2 * c.head_width
    assert forecast(cut, 60.0)["temporary_bytes"]["publish"] == 2 * layer  # which is more than the embedding
    alone = Shapes(configured("mesh.data=1", "mesh.fsdp=1", "engine.dtype=bfloat16"))
    assert forecast(alone, 60.0)["temporary_bytes"]["publish"] == 0


def test_a_process_reward_model_is_a_critic_and_continuations_and_rounds_are_counted() -> None:
    prm = Shapes(configured("mesh.data=1", "algo.name=agent_prm"))
    assert held_bytes(prm)["critic"] and not prm.overlap["streamed"]
    branched = Shapes(configured("mesh.data=1", "algo.name=anchor_gae", "feed.branches=3"))
    assert iteration(branched, 2.0)["episodes"] == 8 + 3 * branched.config.feed.prompts
    dapo = Shapes(configured("mesh.data=1", "algo.name=dapo", "train.minibatches=1", "feed.max_staleness=1"))
    assert dapo.overlap == {"streamed": True, "ahead": True}
    assert iteration(dapo, 2.0)["episodes"] == 8 * dapo.config.feed.max_rounds


def test_every_seat_is_counted_and_so_are_the_engines_of_earlier_versions() -> None:
    tree, faults = configs.load(f"{CONFIGS / 'kuhn.py'}:runlocal", ["mesh.data=1"])
    assert faults == []
    kuhn = Shapes(tree)
    held, counted = held_bytes(kuhn), iteration(kuhn, 2.0)
    assert held["past versions"] == held["sampler copy"] + held["key-value cache"] + held["rows"]
    assert counted["sampled_tokens"] == 2 * counted["episodes"] * min(160, 4 * 6)


def test_a_plan_is_told_and_one_that_cannot_fit_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", f"--config={SPEC}", "--json"]
    assert command(asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["held_bytes"]["weights"] and told["iteration"]["staleness"] == 0
    assert command([*asked, *(f"--config.{change}" for change in BIG)]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["held_bytes"]["weights"] > told["memory_bytes"]
    assert "does not fit: a device needs" in err and "the moments with" in err and "mesh.fsdp" in err
    assert len(err.splitlines()) == 1


def test_a_plan_is_read_as_lines_and_nothing_is_compiled_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("mesh.data=2", "mesh.fsdp=2", "mesh.cpu_devices=8", "feed.max_staleness=2")
    before = len(compilations.compiled)
    assert command(["plan", f"--config={SPEC}", "--iteration-s=2", *(f"--config.{change}" for change in changes)]) == 0
    assert compilations.compiled[before:] == []
    text = capsys.readouterr().out.splitlines()
    assert "training mesh: data 2 x fsdp 2" in text[1] and text[2] == "sampling: 4 replicas of 1 devices, 32 trajectories each"
    parts = {line.split("  ")[1] for line in text if line.startswith("  ")}
    assert parts >= {"weights", "moments", "gradient sum", "sampler copy", "key-value cache", "gradient", "update", "sampling"}
    programs = next(line for line in text if line.startswith("programs to compile"))
    assert re.fullmatch(r"programs to compile: \d+; prefill lengths \[4, 8\], positions read \[80\]", programs)
    work = next(line for line in text if line.startswith("an iteration at most"))
    assert "8 episodes" in work and "2 optimizer steps, staleness 2" in work
    assert re.search(r"64 calls, .* CPU-s beside the programs' own: 0\.\d+ cores for iterations of 2 s", text[-1])


def test_a_config_with_faults_and_a_mesh_that_does_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", f"--config={SPEC}", "--config.train.minibatches=9", "--config.sampling.top_k=5"]) == 2
    err = capsys.readouterr().err
    assert "train.minibatches" in err and "sampling.top_k" in err
    assert command(["plan", f"--config={SPEC}", "--config.mesh.fsdp=3"]) == 2
    assert "mesh data=0 x fsdp=3" in capsys.readouterr().err
    assert command(["plan", f"--config={SPEC}", "--topology=v9:2x2"]) == 2
    assert "chips are v5e, v5p, v6e, tpu7x" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_its_compiler_a_topology_is_refused_with_the_name_of_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", f"--config={SPEC}", "--topology=v5e:2x2"]) == 2
    assert "the extra `tpu` installs" in capsys.readouterr().err


def test_rooflines_and_links_by_hand() -> None:
    chip = CHIPS["v5e"]
    least = roofline_s(chip, flop=197e12, moved_bytes=819e9 / 2, linked_bytes=400e9)
    assert least == {"compute_s": pytest.approx(1), "memory_s": pytest.approx(0.5), "links_s": pytest.approx(2)}
    gather = Collective("all-gather", ("bf16[10,10]",), "layers", "body", "", True, runs=12)
    reduce = Collective("all-reduce", ("f32[5]",), "", "", "", False)
    assert linked_bytes([gather, reduce]) == 12 * 200 + 2 * 20


def test_a_collective_in_loops_is_counted_as_often_as_they_run() -> None:
    text = """HloModule m

%inner (c: (f32[4])) -> (f32[4]) {
  %c = (f32[4]{0}) parameter(0)
  ROOT %all-gather.1 = f32[8]{0} all-gather(%c)
}

%outer (c: (f32[4])) -> (f32[4]) {
  %c = (f32[4]{0}) parameter(0)
  ROOT %w = (f32[4]{0}) while(%c), condition=%x, body=%inner, backend_config={"known_trip_count":{"n":"3"},"a":"b"}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = (f32[4]{0}) parameter(0)
  ROOT %w = (f32[4]{0}) while(%a), condition=%x, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
}
"""
    assert [one.runs for one in collectives(text)] == [15]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, of the extra `tpu`, is not installed")
def test_the_real_programs_are_compiled_for_chips_that_are_not_here() -> None:
    sizes = ("model.head_width=128", "learner.row_tokens=256", "learner.dtype=bfloat16", "engine.dtype=bfloat16")
    run = Shapes(configured("mesh.data=2", *sizes), "v5e:2x2")
    told: dict[str, Any] = forecast(run, 60.0)
    with uncached():
        told["compiled"] = known = compiled(run, told)
    assert set(known["programs"]) == {"gradient", "update", "publish", "append", "decode"}
    gradient = known["programs"]["gradient"]
    there = told["held_bytes"]["weights"] + told["held_bytes"]["gradient sum"]
    assert 1 <= gradient["argument_bytes"] / there < 1.4  # rows beside them, and what a chip fills up
    assert gradient["linked_bytes"] > there / 4 and not known["programs"]["publish"]["linked_bytes"]
    assert known["iteration_at_least"]["training_s"] > 0 and not does_not_fit(told)
    assert any(line.startswith("  decode") for line in lines(told))
    told["memory_bytes"] = 1000
    assert "a v5e has" in does_not_fit(told) and "estimate" not in does_not_fit(told)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, of the extra `tpu`, is not installed")
def test_an_engine_of_four_chips_of_many_is_compiled_as_one_hosts() -> None:
    sizes = ("model.head_width=128", "model.heads=4", "model.kv_heads=2", "learner.row_tokens=256", "engine.dtype=bfloat16")
    run = Shapes(configured("mesh.data=0", "mesh.tensor=4", "learner.batch_rows=4", *sizes), "v5e:4x4")
    assert len(run.replicas) == 4 and run.engine.mesh.mesh.size == 4
    with uncached():
        assert "all-reduce" in measures(run)["append"]()["runs"]


@pytest.mark.parametrize(("sizes", "measured"), [((896, 24, 14, 64, 4864), 18.67e9), ((1536, 28, 12, 128, 8960), 41.49e9)])
def test_what_a_learner_holds_beside_cudnn_is_what_was_measured_on_a_gpu(sizes: tuple[int, ...], measured: float) -> None:
    """8 rows of 4096 tokens, everything computed again, in bfloat16 on an H200 (benchmarks/gpu_train.py)."""
    D, L, N, H, F = sizes
    decoder = replace(Shapes(configured("mesh.data=1")).decoder, vocab_size=151936, width=D, layers=L, heads=N, head_width=H)
    decoder = replace(decoder, kv_heads=2, ffn_width=F, tied_head=True)
    shapes = params_of(nnx.eval_shape(lambda: Decoder(decoder, nnx.Rngs(0))))[1]
    options = LearnerOptions(8, 4096, remat="full", dtype="bfloat16")
    learner = Learner(decoder, shapes, DeviceMesh.build(1), choose("grpo"), options)
    learner.attention = replace(learner.attention, name="cudnn")
    held = size_bytes(learner.params) + sum(size_bytes(part) for part in learner.held().values())
    assert 0.9 < (held + gradient_temporaries(learner)) / measured < 1.1
