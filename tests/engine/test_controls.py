"""Penalties, bias, min-p, masks and stop sequences: numbers by hand, distributions by chi-square, neighbours bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxagent.engine.controls import NOTHING, ControlSizes, Grammars, Rows, follow, new_controls, settle
from jaxagent.engine.sampling import likeliest, sample, scores, uniforms
from jaxagent.engine.steps import new_rows

V, SYMBOLS = 8, 3
SIZES = ControlSizes(slot_tokens=6, bias_entries=2, stop_sequences=2, stop_sequence_tokens=3)
LOGITS = np.asarray([2.0, -1.0, 0.5, 3.0, 0.0, -2.0, 1.0, 1.5], np.float32)
# State 0 allows the odd tokens, state 1 the even ones. A token is one or two symbols; symbol 2 swaps the states.
GRAMMARS = Grammars(
    jnp.asarray([[0b10101010], [0b01010101]], jnp.uint32),
    jnp.asarray([[0, 0, 1], [1, 1, 0]], jnp.int32),
    jnp.asarray([[0, NOTHING], [2, NOTHING], [1, 1], [2, 2], [0, 2], [0, 0], [2, NOTHING], [1, NOTHING]], jnp.int16),
)
BIAS = {"bias_id": [0, 5], "bias": [0.5, -np.inf]}
HISTORY = {"history": [3, 1, 1, 6, 0, 0], "pos": 3, "began": 2}  # 3 1 were fed, 1 6 were sampled, the rest is not known yet

run_scores = jax.jit(scores)
run_sample = jax.jit(sample)
run_follow = jax.jit(follow)


def rows_of(*settings: dict[str, Any]) -> Rows:
    """Rows in progress with these settings; one that sets a control is controlled."""
    plain, controls = new_rows(len(settings), 2), new_controls(len(settings), SIZES)
    rows = {name: np.array(value) for name, value in {**plain, **controls}.items()}
    rows["live"][:] = True
    for i, setting in enumerate(settings):
        rows["controlled"][i] = any(name in controls for name in setting)
        for name, value in setting.items():
            rows[name][i] = value
    return {name: jnp.asarray(value) for name, value in rows.items()}


def scored(**setting: Any) -> np.ndarray:
    return np.asarray(run_scores(np.stack([LOGITS, LOGITS]), rows_of({}, setting), GRAMMARS))[1]


def test_a_bias_is_added_before_the_temperature() -> None:
    np.testing.assert_allclose(scored(temperature=2.0, **BIAS), [1.25, -0.5, 0.25, 1.5, 0.0, -np.inf, 0.5, 0.75], rtol=1e-6)


def test_repetition_shrinks_what_is_likely_and_sinks_what_is_not_once_for_each_token_of_the_row() -> None:
    want = [2.0, -1.0 * 4, 0.5, 3.0 / 4, 0.0, -2.0, 1.0 / 4, 1.5]  # 3, 1 and 6 are held, 0 is beyond the position
    np.testing.assert_allclose(scored(repetition=4.0, **HISTORY), want, rtol=1e-6)
    np.testing.assert_allclose(scored(repetition=4.0, temperature=0.5, **HISTORY), 2 * np.asarray(want), rtol=1e-6)


def test_presence_counts_once_and_frequency_every_time_of_this_turns_tokens_only() -> None:
    again = {"history": [3, 1, 1, 6, 1, 0], "pos": 4, "began": 2}  # sampled: 1 6 1
    got = scored(presence=0.25, frequency=0.5, temperature=0.5, **again)
    np.testing.assert_allclose(got, 2 * (LOGITS - [0, 0.25 + 2 * 0.5, 0, 0, 0, 0, 0.25 + 0.5, 0]), rtol=1e-6)


def test_the_bias_comes_before_the_penalty_and_the_penalty_before_the_mask() -> None:
    got = scored(repetition=2.0, state=0, bias_id=[1, 3], bias=[3.0, -4.0], **HISTORY)
    np.testing.assert_allclose(got, [-np.inf, 2.0 / 2, -np.inf, -1.0 * 2, -np.inf, -2.0, -np.inf, 1.5], rtol=1e-6)


def test_min_p_keeps_what_is_at_least_that_share_as_likely_as_the_likeliest() -> None:
    share = np.exp(LOGITS - LOGITS.max())
    for min_p in (0.0, 0.1, 0.5, 1.0):
        np.testing.assert_array_equal(np.isfinite(scored(min_p=min_p)), share >= min_p)
    kept = np.isfinite(scored(min_p=0.3, temperature=3.0))  # of what temperature made of it
    np.testing.assert_array_equal(kept, share ** (1 / 3) >= 0.3)


def test_min_p_is_taken_of_what_top_k_and_top_p_left_and_all_after_the_mask() -> None:
    even = np.isfinite(scored(state=1, top_k=2))
    assert np.flatnonzero(even).tolist() == [0, 6]  # the two likeliest of 0 2 4 6
    assert np.flatnonzero(np.isfinite(scored(state=1, top_k=3, min_p=0.3))).tolist() == [0, 6]  # 2 has 0.22 of 0


def test_greedy_takes_the_likeliest_of_what_is_allowed_with_logprob_zero() -> None:
    rows = rows_of({"temperature": 0.0}, {"temperature": 0.0, "state": 1}, {"temperature": 0.0, **BIAS, "repetition": 9.0})
    token, logprob = run_sample(np.stack([LOGITS] * 3), np.full(3, 0.5, np.float32), rows, GRAMMARS)
    assert (token.tolist(), logprob.tolist()) == ([3, 0, 3], [0.0, 0.0, 0.0])


SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "bias": BIAS,
    "repetition": {"repetition": 2.5, **HISTORY},
    "presence": {"presence": 1.5, **HISTORY},
    "frequency": {"frequency": 1.5, **HISTORY},
    "mask": {"state": 0},
    "all": {
        "temperature": 1.6,
        "top_k": 6,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition": 1.5,
        "presence": 0.3,
        **BIAS,
        **HISTORY,
    },
}


def expected(setting: dict[str, Any]) -> np.ndarray:
    """The distribution of a setting, said once more in plain numpy."""
    s = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    s |= {"bias_id": [], "bias": [], "history": [], "pos": -1, "began": 0, "state": NOTHING} | setting
    z = LOGITS.astype(np.float64)
    for token, bias in zip(s["bias_id"], s["bias"], strict=True):
        z[token] += bias
    for token in set(s["history"][: s["pos"] + 1]):
        z[token] = z[token] / s["repetition"] if z[token] > 0 else z[token] * s["repetition"]
    for token in set(s["history"][s["began"] : s["pos"] + 1]):
        z[token] -= s["presence"] + s["frequency"] * s["history"][s["began"] : s["pos"] + 1].count(token)
    if s["state"] >= 0:
        z[[i for i in range(V) if i % 2 == s["state"]]] = -np.inf
    p = np.exp(z / s["temperature"])
    p /= p.sum()
    order = np.argsort(-p)
    if s["top_k"]:
        p[order[s["top_k"] :]] = 0
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= s["top_p"] * p.sum()]] = 0
    p[p < s["min_p"] * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))
def test_draws_and_logprobs_are_those_of_the_stated_distribution(setting: dict[str, Any]) -> None:
    draws = 20_000
    one = {name: np.asarray(value) for name, value in rows_of(setting).items()}
    rows = {name: jnp.asarray(np.repeat(value, draws, 0)) for name, value in one.items()}
    key = np.random.default_rng(3).integers(0, 2**32, (draws, 2), np.uint32)
    u = uniforms(key, np.full((draws, 1), 5, np.int32))[:, 0]
    token, logprob = (np.asarray(x) for x in run_sample(np.broadcast_to(LOGITS, (draws, V)), u, rows, GRAMMARS))
    p = expected(setting)
    observed = np.bincount(token, minlength=V)
    assert set(np.flatnonzero(observed)) <= set(np.flatnonzero(p))
    often = p * draws >= 5
    assert stats.chisquare(observed[often], p[often] * observed[often].sum() / p[often].sum()).pvalue > 1e-3
    np.testing.assert_allclose(logprob, np.log(p[token]), atol=1e-5)


def test_the_controls_of_a_row_do_not_change_a_bit_of_its_neighbours() -> None:
    logits = np.random.default_rng(0).standard_normal((12, V)).astype(np.float32) * 2
    u = np.random.default_rng(1).random(12).astype(np.float32)
    settings = [{}, *SETTINGS.values(), {}]
    together = [np.asarray(x) for x in run_sample(logits, u, rows_of(*settings), GRAMMARS)]
    for i, setting in enumerate(settings):
        alone = run_sample(logits, u, rows_of(*[setting if j == i else {} for j in range(12)]), GRAMMARS)
        for a, b in zip(alone, together, strict=True):
            assert np.asarray(a)[i] == b[i]
    assert len(set(together[1].tolist())) == 12


def test_the_likeliest_tokens_come_with_the_logprobs_that_they_were_drawn_with() -> None:
    rows = rows_of({"top": True}, {"top": True, "top_k": 2})
    token, logprob = jax.jit(likeliest, static_argnums=3)(np.stack([LOGITS] * 2), rows, GRAMMARS, 3)
    assert token.tolist()[0] == [3, 0, 7]
    assert token.tolist()[1][:2] == [3, 0]
    np.testing.assert_allclose(logprob[0], np.log(expected({})[[3, 0, 7]]), atol=1e-5)
    np.testing.assert_allclose(logprob[1, :2], np.log(expected({"top_k": 2})[[3, 0]]), atol=1e-5)
    assert logprob[1, 2] == -np.inf


def test_a_stop_sequence_is_done_with_its_last_token_and_not_before() -> None:
    rows = rows_of({"pattern": [[NOTHING, 4, 2], [1, 4, 1]]}, {"pattern": [[NOTHING, NOTHING, 2]] * 2}, {"top": True})
    seen = []
    for token in ([4, 4, 4], [1, 1, 1], [4, 4, 2], [1, 1, 1], [4, 2, 1], [2, 4, 1]):
        rows, done = run_follow(rows, jnp.asarray(token), GRAMMARS)
        seen.append(done.tolist())
    assert [i for i, done in enumerate(seen) if done[0]] == [3, 5]
    assert [i for i, done in enumerate(seen) if done[1]] == [4]
    assert not any(done[2] for done in seen)


def test_a_rows_state_advances_by_the_symbols_of_its_tokens_and_its_history_grows() -> None:
    rows = rows_of({"state": 0, **HISTORY}, {"state": 0, "live": False, **HISTORY}, {"state": NOTHING, **HISTORY})
    rows, _ = run_follow(rows, jnp.asarray([1, 1, 1]), GRAMMARS)
    assert rows["state"].tolist() == [1, 0, NOTHING]
    assert rows["history"][:, 4].tolist() == [1, 0, 1]
    for token, state in ((2, 1), (3, 1), (4, 0), (5, 0)):
        rows, _ = run_follow(rows, jnp.asarray([token] * 3), GRAMMARS)
        assert rows["state"].tolist()[0] == state


def test_controls_are_written_for_the_slots_that_are_named() -> None:
    rows = rows_of({}, {}, {})
    new = {name: np.array(value) for name, value in new_controls(2, SIZES).items() if name != "controlled"}
    new["min_p"][:] = 0.5, 0.25
    written = settle(rows, jnp.asarray([2, 99]), new)
    assert written["min_p"].tolist() == [0.0, 0.0, 0.5]
    assert set(written) == set(rows)
