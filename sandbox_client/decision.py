"""What the server decides before it serves: which level is enough, whether code runs at all, and with which pools."""

import argparse
import asyncio
import contextlib
import ipaddress
import os
import platform
import sys
from collections.abc import Sequence

from . import gvisor
from .app import Policy
from .groups import Limits
from .languages import Language, find, toolchains
from .pool import Pool, child_environment, readable_paths
from .pools import Pools
from .probe import ATTACKS, LADDER, MISSING, FatalError, Rung, climb, run_attacks
from .seccomp import AUDIT_ARCH

if sys.platform == "linux":
    from . import jail

_FUNCTIONS_ONLY = ("any isolation: so programs are refused, and fixed functions run in the server",)
_WARM_IMPORTS = 32  # their children are dearer, and fewer programs want them


class StartError(Exception):
    """One sentence: what was wanted, what was found, what to do."""


def user_id() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else -1  # Windows has no such number, and no root


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _levels(options: argparse.Namespace) -> list[str]:
    wanted = [level for level in LADDER if level >= options.min_isolation]
    if options.i_understand_unsandboxed:
        if not is_loopback(options.host) or user_id() == 0:
            raise StartError("--i-understand-unsandboxed is for an ordinary user on a loopback address only")
        if options.min_isolation != "L4":  # which this server does not give, and so refuses, whatever else it is told
            wanted.append("L0")
    return wanted


def _limits(options: argparse.Namespace) -> Limits:
    sizes = {"memory_bytes": options.memory_mb << 20, "disk_bytes": options.disk_mb << 20}
    return Limits()._replace(**sizes, processes=options.processes)


def _unsupported() -> Rung | None:
    """Returns why no level can be had on this kind of machine, before anything is tried."""
    elsewhere = "run the server in a Linux container, or give the address of one that runs elsewhere"
    if sys.platform != "linux":
        return Rung("L1", f"local isolation needs Linux, this is {platform.system()}", elsewhere)
    if platform.machine() not in AUDIT_ARCH:
        return Rung("L1", f"no system-call table for {platform.machine()}, only for {', '.join(AUDIT_ARCH)}", elsewhere)
    return None


def _missing(level: str, root: bool) -> tuple[str, ...]:
    return MISSING[level] if root else (*MISSING[level], "a uid of their own for graders: only namespaces keep them apart")


async def _start_others(pools: Pools) -> None:
    """Starts the zygotes that import more. Raises StartError, with every zygote ended, when one cannot."""
    try:
        for problem in await asyncio.gather(*(pool.start() for pool in pools.all[1:])):
            if problem:
                raise StartError(str(problem.get("fatal") or problem.get("reason")))
    except StartError:
        await pools.close()
        raise


def _languages(pool: Pool, homes: Sequence[str]) -> dict[str, Language]:
    limits = pool.limits
    address_bytes = limits.address_bytes if pool.level == "L3" else limits.memory_bytes
    return find(child_environment(homes)["PATH"], [*readable_paths(), *homes], address_bytes)


async def choose(options: argparse.Namespace, functions: tuple[str, ...]) -> tuple[Pools | None, Policy]:
    """Returns the pools of the best level and what is thereby allowed. Raises StartError where that is not enough."""
    if options.code == "off":
        why = "this server was started with --code=off"
        return None, Policy("L0", _FUNCTIONS_ONLY, False, why, "start it with --code=require", functions)
    root = user_id() == 0
    uid = options.uid + 1 if root else None  # programs can neither signal nor trace the server's own uid
    unsupported = _unsupported()
    levels = [] if unsupported else _levels(options)

    homes = toolchains() if levels else []

    def make(level: str, limits: Limits, warm: int, imports: Sequence[str] = ()) -> Pool:
        return Pool(level, functions, uid, limits, warm, imports, homes)

    try:
        pool, _, rungs = await climb(make, levels, _limits(options), options.warm)
    except FatalError as error:
        raise StartError(str(error)) from None
    if pool:
        graders = (
            Pool(pool.level, (), uid and uid + 1, pool.limits, options.graders)
            if options.graders and pool.level > "L1"
            else None
        )
        most = min(options.warm, max(_WARM_IMPORTS, 4 * (os.cpu_count() or 1)))
        pools = Pools(pool, [make(pool.level, pool.limits, most, words.split(",")) for words in options.imports], graders)
        await _start_others(pools)
        return pools, Policy(pool.level, _missing(pool.level, root), True, None, None, functions, _languages(pool, homes))
    if options.min_isolation == "L4" and not unsupported:
        rungs = [Rung("L4", await gvisor.refusal(), gvisor.REMEDY)]
    rungs = [unsupported] if unsupported else rungs
    reason = f"wanted isolation {options.min_isolation} or better; " + "; ".join(f"{r.level}: {r.reason}" for r in rungs)
    remedies = [rungs[-1].remedy] if rungs[-1].remedy else []
    if sys.platform == "linux" and not unsupported and options.min_isolation > "L1" and jail.landlock_abi() >= 6:
        remedies.append(f"accept less with --min-isolation={'L3' if options.min_isolation == 'L4' else 'L1'}")
    remedy = "; or ".join(remedies) or "run the server on another machine"
    if options.code == "require":
        raise StartError(f"{reason}: {remedy}; or serve fixed functions only with --code=auto")
    return None, Policy("L0", _FUNCTIONS_ONLY, False, reason, remedy, functions)


async def self_test(options: argparse.Namespace) -> int:
    """Prints what each attack reached at this machine's best level, and why better levels cannot be had."""
    unsupported = _unsupported()
    uid = options.uid + 1 if user_id() == 0 else None

    def make(level: str, limits: Limits, warm: int) -> Pool:
        return Pool(level, (), uid, limits, warm)

    pool, _, rungs = (None, [], [unsupported]) if unsupported else await climb(make, LADDER, _limits(options), 4)
    if not unsupported:
        rungs = [Rung("L4", await gvisor.refusal(), gvisor.REMEDY), *rungs]
    for rung in rungs:
        print(f"{rung.level}: not here: {rung.reason}" + (f" [{rung.remedy}]" if rung.remedy else ""))
    if pool is None:
        print("no level: programs are refused; fixed functions can be served with --code=auto")
        return 1
    results = await run_attacks(pool, make, starting=False)
    await pool.close()
    width = max(len(attack.name) for attack in ATTACKS)
    print(f"{pool.level}: {len(results)} attacks; lacks {'; '.join(MISSING[pool.level])}")
    for attack, reached in results:
        print(f"  {attack.name:<{width}}  {'GOT THROUGH: ' + reached if reached else 'stopped'}  ({attack.promise})")
    for attack in ATTACKS:
        if attack.level > pool.level:
            print(f"  {attack.name:<{width}}  not stopped below {attack.level}  ({attack.promise})")
    return int(any(reached for _, reached in results) or pool.level < options.min_isolation)
