"""Counts what XLA compiles, from disk or anew, in this process."""

from __future__ import annotations

import jax

compiled: list[str] = []


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if "backend_compile" in event:
        compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)
