"""The scores that tokens are drawn from against the logits processors of transformers. Needs torch: `pytest -m parity`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxagent.engine.controls import ControlSizes, new_controls
from jaxagent.engine.sampling import scores
from jaxagent.engine.steps import new_rows

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

V, ROWS, HELD = 97, 16, 12
SIZES = ControlSizes(slot_tokens=HELD + 4, bias_entries=4, stop_sequences=1, stop_sequence_tokens=2)
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.15},
    {"repetition": 1.3},
    {"repetition": 0.8},
    {"bias": {3: 2.0, 90: -4.5, 17: -np.inf}},
    {"bias": {3: 2.0, 90: -1.0}, "repetition": 1.7, "temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_scores_equal_those_of_the_processors_of_transformers(setting: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((ROWS, V)).astype(np.float32)
    history = rng.integers(0, V, (ROWS, HELD)).astype(np.int32)
    rows = {name: np.array(x) for name, x in {**new_rows(ROWS, 1), **new_controls(ROWS, SIZES)}.items()}
    rows["controlled"][:] = True
    rows["history"][:, :HELD], rows["pos"][:], rows["began"][:] = history, HELD - 1, HELD
    processors = transformers.LogitsProcessorList()
    for name, value in setting.items():
        if name == "bias":
            for i, (token, bias) in enumerate(value.items()):
                rows["bias_id"][:, i], rows["bias"][:, i] = token, bias
            processors.append(transformers.SequenceBiasLogitsProcessor([[[t], b] for t, b in value.items()]))
        else:
            rows[name][:] = value
            processors.append(
                {
                    "temperature": transformers.TemperatureLogitsWarper,
                    "top_k": transformers.TopKLogitsWarper,
                    "top_p": transformers.TopPLogitsWarper,
                    "min_p": transformers.MinPLogitsWarper,
                    "repetition": transformers.RepetitionPenaltyLogitsProcessor,
                }[name](value)
            )
    got = np.asarray(jax.jit(scores)(logits, rows))
    want = processors(torch.tensor(history).long(), torch.tensor(logits)).numpy()
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
