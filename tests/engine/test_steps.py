"""The jitted programs: whatever path a row takes through append, fork and decode, it equals the plain full forward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxagent.engine.cache import Cache, new_cache
from jaxagent.engine.steps import Rows, Steps, advance, make_steps, new_rows
from jaxagent.models.transformer import Decoder, DecoderConfig, Params, params_of

SLOTS, LENGTH, CHUNK, DECODE = 3, 24, 8, 4
KINDS = {
    "tied, QK norm": {},
    "untied, biases": {"qk_norm": False, "qkv_bias": True, "tied_head": False},
    "sliding, capped, scaled": {
        "activation": "gelu_tanh",
        "plus_one_norms": True,
        "post_norms": True,
        "scaled_embed": True,
        "attn_softcap": 2.0,
        "sliding": (True, False),
        "window": 5,
        "local_rope_theta": 20.0,
        "logit_softcap": 3.0,
    },
    "a mixture": {"experts": 4, "experts_per_token": 2},
}


class Rig:
    """The programs of one engine and what they work on, driven by hand."""

    def __init__(self, config: DecoderConfig):
        self.config = config
        self.policy: Decoder = tiny.policy(config)
        self.steps: Steps = make_steps(config, dtype=jnp.dtype("float32"), chunk=CHUNK, decode_tokens=DECODE, mesh=tiny.mesh())
        self.params: Params = self.steps.publish(params_of(self.policy)[1])
        self.full = jax.jit(lambda tokens: jax.nn.log_softmax(self.policy(tokens)))
        self.clear()

    def clear(self) -> None:
        self.cache: Cache = new_cache(self.config, SLOTS, LENGTH, jnp.float32)
        self.rows: Rows = new_rows(SLOTS, 2)

    def append(self, work: list[tuple[int, int, list[int]]], bucket: int = 8, rows: int = 2) -> None:
        """Appends (slot, position, tokens) rows in one call."""
        slot, start, count = np.zeros((3, rows), np.int32)
        token = np.zeros((rows, bucket), np.int32)
        for i, (s, at, tokens) in enumerate(work):
            slot[i], start[i], count[i] = s, at, len(tokens)
            token[i, : len(tokens)] = tokens
        self.cache = self.steps.append(self.params, self.cache, slot, token, start, count)[0]

    def decode(
        self,
        begin: dict[int, tuple[int, int]] | None = None,
        left: int = 20,
        stop: int = -1,
        used: int = 0,
        drafts: np.ndarray | None = None,
    ) -> tuple[np.ndarray, ...]:
        """One decode call, or one that verifies drafts; `begin` arms slots with (pending token, its position)."""
        armed = {name: np.zeros(old.shape, old.dtype) for name, old in self.rows.items()}
        armed["mask"] = np.zeros(SLOTS, bool)
        armed["temperature"][:], armed["top_p"][:], armed["stop"][:] = 1.0, 1.0, stop
        for slot, (token, pos) in (begin or {}).items():
            armed["mask"][slot] = armed["live"][slot] = True
            armed["token"][slot], armed["pos"][slot], armed["left"][slot], armed["key"][slot] = token, pos, left, (7, slot)
        some = used or drafts is not None
        slots = np.asarray([2, 0, SLOTS, 1], np.int32) if some else None
        state = self.params, self.cache, self.rows, armed, None, slots
        if drafts is None:
            self.cache, self.rows, tokens, logprobs, *_ = self.steps.decode(*state, used)
        else:
            self.cache, self.rows, tokens, logprobs, *_ = self.steps.verify(*state, drafts[[2, 0, 0, 1]])
        order = [1, 3, 0] if some else slice(None)  # back to the order of the slots
        return np.asarray(tokens)[order], np.asarray(logprobs)[order]


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(tiny.config(**request.param))


@pytest.fixture
def fresh(rig: Rig) -> Rig:
    rig.clear()
    return rig


def prompt(rig: Rig, length: int, seed: int = 0) -> list[int]:
    return tiny.tokens(rig.config, length, seed=seed).tolist()


def assert_equal_to_full_forward(rig: Rig, before: list[int], sampled: np.ndarray, logprobs: np.ndarray) -> None:
    row = [*before, *sampled.tolist()]
    full = rig.full(jnp.asarray([row + [0] * (LENGTH - len(row))]))[0]
    want = [full[at - 1, row[at]] for at in range(len(before), len(row))]
    np.testing.assert_allclose(logprobs, want, atol=1e-5)


def test_decoded_logprobs_equal_those_of_the_full_forward(fresh: Rig) -> None:
    prompts = {0: prompt(fresh, 9, 1), 2: prompt(fresh, 3, 2)}  # of unequal length, one slot empty
    fresh.append([(slot, 0, tokens[:-1]) for slot, tokens in prompts.items()])
    first = fresh.decode({slot: (tokens[-1], len(tokens) - 1) for slot, tokens in prompts.items()})
    second = fresh.decode()
    sampled, logprobs = (np.concatenate(parts, axis=1) for parts in zip(first, second, strict=True))
    for slot, tokens in prompts.items():
        assert_equal_to_full_forward(fresh, tokens, sampled[slot], logprobs[slot])
    np.testing.assert_array_equal(sampled[1], -1)


def test_reading_the_positions_in_use_in_one_pass_gives_the_same_tokens(fresh: Rig) -> None:
    prompts = {0: prompt(fresh, 7, 1), 1: prompt(fresh, 1, 3), 2: prompt(fresh, 3, 2)}  # one has nothing in its slot yet
    found = {}
    for used in (0, CHUNK):
        fresh.clear()
        fresh.append([(slot, 0, tokens[:-1]) for slot, tokens in prompts.items() if len(tokens) > 1])
        begin = {slot: (tokens[-1], len(tokens) - 1) for slot, tokens in prompts.items()}
        first = fresh.decode(begin, left=6, used=used)
        found[used] = first, fresh.decode(used=used and LENGTH)  # which ends in the middle of the call
        assert not fresh.rows["live"].any()
    for want, got in zip(found[0], found[CHUNK], strict=True):
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_allclose(got[1], want[1], atol=1e-5)
    row = [*prompts[1], *np.concatenate([call[0][1] for call in found[CHUNK]])[:6].tolist(), 1]
    fresh.append([(1, 6, row[6:7])])  # the pending token
    after = fresh.decode({1: (1, 7)})  # what was kept in the slots is what the next turn sees
    assert_equal_to_full_forward(fresh, row, after[0][1], after[1][1])


def test_a_verified_draft_gives_what_decoding_gives_and_leaves_what_it_leaves(fresh: Rig) -> None:
    prompts = {0: prompt(fresh, 7, 1), 1: prompt(fresh, 6, 3), 2: prompt(fresh, 3, 2)}
    begin = {slot: (tokens[-1], len(tokens) - 1) for slot, tokens in prompts.items()}
    for slot, tokens in prompts.items():
        fresh.append([(slot, 0, tokens[:-1])])
    said = np.concatenate([fresh.decode(begin)[0], fresh.decode()[0]], axis=1)
    fresh.clear()
    for slot, tokens in prompts.items():
        fresh.append([(slot, 0, tokens[:-1])])
    drafts = said[:, :3].copy()
    drafts[1, 1] = (drafts[1, 1] + 1) % 40  # one that comes true, one that does not from its second token on, and none
    drafts[2] = -1
    found, logprobs = fresh.decode(begin, drafts=drafts)
    counts = [4, 2, 1]
    np.testing.assert_array_equal(found, np.where(np.arange(4) < np.asarray(counts)[:, None], said[:, :4], -1))
    assert fresh.rows["pos"].tolist() == [len(prompts[i]) - 1 + counts[i] for i in range(3)]
    after, logprobs_after = fresh.decode()
    for slot, count in enumerate(counts):
        np.testing.assert_array_equal(after[slot], said[slot, count : count + DECODE])
        both = (
            np.concatenate([found[slot, :count], after[slot]]),
            np.concatenate([logprobs[slot, :count], logprobs_after[slot]]),
        )
        assert_equal_to_full_forward(fresh, prompts[slot], *both)


def test_a_stop_or_an_empty_budget_within_a_draft_ends_the_turn(fresh: Rig) -> None:
    tokens = prompt(fresh, 4)
    begin = {0: (tokens[-1], 3)}
    fresh.append([(0, 0, tokens[:-1])])
    free, _ = fresh.decode(begin)
    drafts = np.full((SLOTS, 3), -1)
    drafts[0] = free[0, :3]
    for ends in ({"stop": int(free[0, 1])}, {"left": 2}):
        fresh.clear()
        fresh.append([(0, 0, tokens[:-1])])
        found, _ = fresh.decode(begin, drafts=drafts, **ends)
        count = min(2, free[0].tolist().index(ends["stop"]) + 1 if "stop" in ends else 2)
        np.testing.assert_array_equal(found[0], [*free[0, :count], *[-1] * (4 - count)])
        np.testing.assert_array_equal(found[1:], -1)
        assert not fresh.rows["live"].any()


def test_appending_in_pieces_equals_appending_at_once(fresh: Rig) -> None:
    tokens = prompt(fresh, 16)
    fresh.append([(0, 0, tokens[:8])])
    fresh.append([(0, 8, tokens[8:])])
    fresh.append([(1, 0, tokens[:3])], bucket=4)
    fresh.append([(1, 3, tokens[3:7])], bucket=4)
    fresh.append([(1, 7, tokens[7:15])])
    fresh.append([(1, 15, tokens[15:])], bucket=4)
    for layer in fresh.cache:
        for both in layer:
            used = both if both.shape[2] == LENGTH else both.swapaxes(2, 3)
            np.testing.assert_allclose(used[0, :, :16], used[1, :, :16], atol=1e-5)
    sampled, logprobs = fresh.decode({0: (tokens[0], 16), 1: (tokens[0], 16)})
    assert_equal_to_full_forward(fresh, [*tokens, tokens[0]], sampled[1], logprobs[1])


def test_padding_of_a_call_writes_nothing(fresh: Rig) -> None:
    tokens = prompt(fresh, 8)
    fresh.append([(0, 0, tokens)])
    before = jax.tree.map(np.array, fresh.cache)
    fresh.append([(1, 0, tokens[:2])])  # the call's second row is padding that names slot 0
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(fresh.cache), strict=True):
        np.testing.assert_array_equal(old[0], new[0])
        np.testing.assert_array_equal(old[2], new[2])


def test_a_forked_row_goes_on_bit_for_bit_like_one_that_was_prefilled(fresh: Rig) -> None:
    tokens = prompt(fresh, 8)
    fresh.append([(0, 0, tokens[:-1]), (1, 0, tokens[:-1])])
    alone = fresh.decode({1: (tokens[-1], 7)})
    fresh.clear()
    fresh.append([(0, 0, tokens[:-1])])
    fresh.cache = fresh.steps.fork(fresh.cache, np.asarray([0, 0], np.int32), np.asarray([1, SLOTS], np.int32), CHUNK)
    forked = fresh.decode({1: (tokens[-1], 7)})
    np.testing.assert_array_equal(alone[0][1], forked[0][1])
    np.testing.assert_array_equal(alone[1][1], forked[1][1])


def test_a_row_is_bit_equal_alone_in_another_slot_and_beside_longer_ones(fresh: Rig) -> None:
    tokens = prompt(fresh, 5)

    def run(slot: int, neighbours: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
        fresh.clear()
        for other, length in neighbours.items():
            fresh.append([(other, 0, prompt(fresh, length, seed=9)[:8])])
            if length > 8:
                fresh.append([(other, 8, prompt(fresh, length, seed=9)[8:])])
        fresh.append([(slot, 0, tokens[:-1])])
        begin = {other: (1, length) for other, length in neighbours.items()}
        armed = {**begin, slot: (tokens[-1], 4)}
        out = fresh.decode(armed)
        return out[0][slot], out[1][slot]

    alone = run(0, {})
    for crowd in ({1: 16}, {1: 2, 2: 9}):
        beside = run(0, crowd)
        np.testing.assert_array_equal(alone[0], beside[0])
        np.testing.assert_array_equal(alone[1], beside[1])


@pytest.mark.parametrize("used", [0, LENGTH], ids=["exact", "fast"])
def test_what_was_sampled_and_is_fed_again_call_by_call_has_the_same_bits(fresh: Rig, used: int) -> None:
    """Teacher-forced through the same program: the host says where every call begins, the device's own state is not used."""
    tokens = prompt(fresh, 7, 1)
    begin = {0: (tokens[-1], 6)}
    fresh.append([(0, 0, tokens[:-1])])
    free = [fresh.decode(begin, used=used), fresh.decode(used=used)]
    fresh.clear()
    fresh.append([(0, 0, tokens[:-1])])
    forced = [fresh.decode(begin, used=used), fresh.decode({0: (int(free[0][0][0, -1]), 6 + DECODE)}, used=used)]
    for (drawn, logprobs), (want, want_logprobs) in zip(forced, free, strict=True):
        np.testing.assert_array_equal(drawn, want)
        np.testing.assert_array_equal(logprobs, want_logprobs)
    assert free[1][0][0].tolist() != free[0][0][0].tolist()


def test_a_stop_token_freezes_its_row_and_no_other(fresh: Rig) -> None:
    tokens = prompt(fresh, 4)
    begin = {0: (tokens[-1], 3), 1: (tokens[-1], 3)}
    fresh.append([(0, 0, tokens[:-1]), (1, 0, tokens[:-1])])
    free, _ = fresh.decode(begin)
    stop = int(free[0, 1])
    fresh.clear()
    fresh.append([(0, 0, tokens[:-1]), (1, 0, tokens[:-1])])
    stopped, logprobs = fresh.decode(begin, stop=stop)
    at = int(np.argmax(stopped[0] == stop))
    np.testing.assert_array_equal(stopped[0], [*free[0, : at + 1], *[-1] * (DECODE - at - 1)])
    np.testing.assert_array_equal(logprobs[0, at + 1 :], 0.0)
    assert not fresh.rows["live"][0]
    if stop not in free[1]:
        np.testing.assert_array_equal(stopped[1], free[1])


def test_an_empty_budget_freezes_a_row_in_the_middle_of_a_call(fresh: Rig) -> None:
    tokens = prompt(fresh, 4)
    fresh.append([(0, 0, tokens[:-1])])
    sampled, _ = fresh.decode({0: (tokens[-1], 3)}, left=3)
    assert np.all(sampled[0, :3] >= 0)
    assert sampled[0, 3] == -1


def test_only_live_rows_advance() -> None:
    rows = {**new_rows(3, 2), "live": jnp.asarray([True, False, True]), "left": jnp.asarray([5, 5, 1]), "pos": jnp.arange(3)}
    after = advance(rows, jnp.asarray([11, 12, 13]))
    assert after["token"].tolist() == [11, 0, 13]
    assert after["pos"].tolist() == [1, 1, 3]
    assert after["left"].tolist() == [4, 5, 0]
    assert after["live"].tolist() == [True, False, False]


def test_published_weights_outlive_those_they_were_copied_from(rig: Rig) -> None:
    source = jax.tree.map(jnp.copy, params_of(rig.policy)[1])
    published = rig.steps.publish(source)
    jax.tree.map(lambda x: x.delete(), source)
    np.testing.assert_array_equal(published["norm"], rig.params["norm"])


def test_a_bfloat16_engine_is_near_the_float32_forward() -> None:
    rig = Rig(tiny.config(layers=1))
    narrow = make_steps(rig.config, dtype=jnp.dtype("bfloat16"), chunk=CHUNK, decode_tokens=DECODE, mesh=tiny.mesh())
    rig.steps, rig.params = narrow, narrow.publish(params_of(rig.policy)[1])
    rig.cache = new_cache(rig.config, SLOTS, LENGTH, jnp.bfloat16)
    tokens = prompt(rig, 6)
    rig.append([(0, 0, tokens[:-1])])
    sampled, logprobs = rig.decode({0: (tokens[-1], 5)})
    row = [*tokens, *sampled[0].tolist()]
    full = rig.full(jnp.asarray([row + [0] * (LENGTH - len(row))]))[0]
    np.testing.assert_allclose(logprobs[0], [full[at - 1, row[at]] for at in range(6, len(row))], atol=0.3)
