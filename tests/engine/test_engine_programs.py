"""Programs compiled side by side are found by the calls that follow, and what is compiled later is counted."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compilations import compiled

from jaxagent.engine.programs import Call, compiled_here, prepare


def test_programs_are_compiled_once_in_other_threads_and_the_calls_thread_what_they_are_given() -> None:
    program = jax.jit(lambda x, n, times: x * n + times, static_argnums=2, donate_argnums=0)
    held = [jax.block_until_ready(jnp.ones(3))]

    def keep(out: Any) -> None:
        held[0] = out

    compiled.clear()
    mine = compiled_here()
    prepare(Call(program, lambda times=times: (held[0], np.float32(2), times), keep) for times in (1, 2))
    assert len(compiled) == 2
    assert compiled_here() == mine  # other threads did it
    np.testing.assert_array_equal(held[0], np.full(3, (1 * 2 + 1) * 2 + 2))
    program(held[0], np.float32(2), 2)
    assert len(compiled) == 2


def test_a_thread_counts_what_it_compiles_itself() -> None:
    counts = []

    def work() -> None:
        before = compiled_here()
        jax.jit(lambda x: x * 3 + 1)(np.ones(2, np.float32))
        counts.append(compiled_here() - before)

    mine = compiled_here()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts == [1]
    assert compiled_here() == mine
