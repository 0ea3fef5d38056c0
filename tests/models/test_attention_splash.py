"""The TPU's splash kernels, interpreted: equal to the reference, and told to visit only blocks that matter."""

from __future__ import annotations

import attention_cases
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from attention_cases import Case

from jaxagent.models.attention_blocked import Rows
from jaxagent.models.attention_context import over_mesh
from jaxagent.models.attention_splash import Splash

LONG = {  # of several blocks, which are 128 long at least
    "window over blocks": Case(lengths=((100, 250, 20),), length=384, heads=2, kv_heads=1, window=140, sliding=True),
    "odd blocks": Case(lengths=((150, 143), (8, 279)), length=300, heads=2, kv_heads=1, window=3, sliding=True),
}
CASES = {**attention_cases.CASES, **LONG}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    case = CASES[name]
    attention_cases.check(case, over_mesh(Splash(case.spec, interpret=True, block=128), tiny.mesh()))


def test_the_kernels_visit_no_block_in_which_no_segment_meets_itself() -> None:
    case = Case(lengths=((128, 256, 128), (512,)), length=512, window=128, sliding=True)
    splash, segment = Splash(case.spec, interpret=True, block=128), case.segments()
    rows = Rows(jnp.arange(512), segment, segment)
    full = splash._kernel(rows, sliding=False, block_q=128, block_kv=128)
    assert np.asarray(full.fwd_mask_info.block_mask).sum(-1).tolist() == [[1, 1, 2, 1, 1, 2, 3, 4]]
    assert np.asarray(full.dkv_mask_info.block_mask).sum(-2).tolist() == [[1, 2, 1, 1, 4, 3, 2, 1]]
    visited = np.asarray(full.fwd_mask_info.data_next)[0]
    assert visited[2].tolist() == [1, 2, 2, 2]  # idle steps stay where they are
    assert visited[4].tolist() == [4, 4, 4, 4]  # the second row's keys stand behind the first's
    near = splash._kernel(rows, sliding=True, block_q=128, block_kv=128)
    assert near.fwd_mask_info.block_mask.shape == (1, 8, 3)  # as many steps as a window can need, wherever it begins
    assert np.asarray(near.fwd_mask_info.block_mask).sum(-1).tolist() == [[1, 1, 2, 1, 1, 2, 2, 2]]
