"""Layouts: what a checkpoint holds is a transposition and a reshape of ours, and a box of ours is a box of theirs."""

from __future__ import annotations

import numpy as np
import pytest

from jaxagent.models.layouts import Layout

OURS = np.arange(5 * 4 * 6).reshape(5, 4, 6)
THEIRS = {
    "as_is": OURS,
    "transposed": OURS.swapaxes(1, 2),
    "into_heads": np.stack([OURS[:, n, h] for n in range(4) for h in range(6)]),  # [N H, D] from [D, N, H]
    "out_of_heads": np.stack([OURS[:, :, d].reshape(-1) for d in range(6)]),  # [D, N H] from [N, H, D]
}


@pytest.mark.parametrize("name", THEIRS)
def test_ours_is_a_transposition_of_theirs_with_the_heads_apart(name: str) -> None:
    layout = Layout(name, OURS.shape)
    assert layout.stored == THEIRS[name].shape
    np.testing.assert_array_equal(THEIRS[name].reshape(layout.apart).transpose(layout.order), OURS)
    np.testing.assert_array_equal(OURS.transpose(layout.inverse).reshape(layout.stored), THEIRS[name])


@pytest.mark.parametrize("name", THEIRS)
def test_the_cover_of_boxes_reaches_no_further_than_they_do(name: str) -> None:
    layout = Layout(name, OURS.shape)
    apart = THEIRS[name].reshape(layout.apart)
    heads = {axis for group in layout.merged for axis in group[1:]}  # read whole: only N is ever cut
    boxes = [
        tuple(slice(0, n) if axis in heads else slice(low, low + 2) for axis, n in enumerate(layout.apart)) for low in (1, 2)
    ]
    stored, covered = layout.cover(boxes)
    assert covered == tuple(slice(0, n) if axis in heads else slice(1, 4) for axis, n in enumerate(layout.apart))
    np.testing.assert_array_equal(THEIRS[name][stored].reshape(apart[covered].shape), apart[covered])


def test_a_vector_of_heads_is_laid_out_flat() -> None:
    layout = Layout("heads", (4, 6))
    assert (layout.stored, layout.apart, layout.order) == ((24,), (4, 6), (0, 1))
    assert layout.cover([(slice(1, 2), slice(0, 6))])[0] == (slice(6, 12),)
