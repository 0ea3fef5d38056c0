"""The servers that a client speaks to, and which of them a trajectory goes to.

Rendezvous hashing (D. Thaler, C. Ravishankar, 1998): a trajectory goes to the endpoint with the highest hash of the pair,
so that one endpoint more or less moves only its own share of the trajectories.
"""

import hashlib
from collections.abc import Iterable, Sequence

from .breaker import Breaker
from .limits import Window

_SLOW = 5.0  # times the fastest endpoint's latency: then others come first
_SLOW_S = 0.05  # and by at least so much
_FORGIVEN = 0.99  # of a measured slowness remains each time it is passed over, so that it is measured again some time


class Endpoint:
    """One server: where it is, how it is, how much it is asked at once."""

    def __init__(self, url: str, max_in_flight: int) -> None:
        self.url = url.rstrip("/")
        self.window = Window(max_in_flight)
        self.breaker = Breaker()
        self.remembers = False  # it has announced that it answers a repeated key from memory
        self.tells = False  # and that it tells what became of a call, and takes one back
        self.echoes = False  # it has announced that it repeats the id of a call

    def __repr__(self) -> str:
        return f"Endpoint({self.url})"


def ranked(key: str, endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Returns the endpoints in the order in which `key` prefers them."""
    return sorted(endpoints, key=lambda endpoint: _weight(key, endpoint.url), reverse=True)


def _weight(key: str, url: str) -> bytes:
    return hashlib.blake2b(f"{len(key)}:{key}{url}".encode(errors="surrogatepass"), digest_size=8).digest()


def choose(key: str, endpoints: Sequence[Endpoint], tried: Sequence[Endpoint] = ()) -> Endpoint:
    """Returns where `key` goes: its favourite that lives, is not far slower than the best, and was not just tried.

    When nothing qualifies it is the one that will admit soonest.
    """
    if len(endpoints) == 1:
        return endpoints[0]
    order = ranked(key, endpoints)
    measured = [e.breaker.latency_s for e in order if e.breaker.answered]
    best_s = min(measured, default=0.0)

    def burden(endpoint: Endpoint) -> tuple[bool, int, bool, float]:
        health = endpoint.breaker
        wait_s = health.admits_in_s()
        slow = bool(health.answered) and health.latency_s > max(_SLOW * best_s, best_s + _SLOW_S)
        return wait_s > 0, sum(endpoint is other for other in tried), slow, wait_s

    chosen = min(order, key=burden)  # min is stable: the preference breaks ties
    for passed in order[: order.index(chosen)]:
        passed.breaker.latency_s *= _FORGIVEN
    return chosen
