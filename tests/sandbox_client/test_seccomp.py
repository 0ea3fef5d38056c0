"""The filter, run by an interpreter of classic BPF: the machine it is for need not be the machine it is tested on."""

import errno
import struct

import pytest

from sandbox_client import seccomp

MACHINES = list(seccomp.AUDIT_ARCH)
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
PLAIN = {"x86_64": {"read": 0, "execve": 59, "openat": 257}, "aarch64": {"read": 63, "execve": 221, "openat": 56}}


def verdict(code: bytes, arch: int, number: int, *arguments: int) -> int:
    """Returns what the kernel would answer, by running the program over a struct seccomp_data."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, arch, 0, *padded)
    lines = [struct.unpack_from("=HBBI", code, place) for place in range(0, len(code), 8)]
    accumulator = place = 0
    while True:
        opcode, yes, no, constant = lines[place]
        place += 1
        if opcode == 0x20:
            accumulator = struct.unpack_from("=I", data, constant)[0]
        elif opcode == 0x06:
            return constant
        else:
            holds = {
                0x15: accumulator == constant,
                0x35: accumulator >= constant,
                0x45: bool(accumulator & constant),
            }[opcode]
            place += yes if holds else no


def build(machine: str, *, sockets: bool = True, own_groups: bool = True) -> tuple[bytes, int, dict[str, int]]:
    code = seccomp.build_filter(machine, sockets=sockets, own_groups=own_groups)
    return code, seccomp.AUDIT_ARCH[machine], seccomp.numbers(seccomp._GUARDED, machine)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_forbidden_call_is_refused_and_plain_ones_pass(machine: str) -> None:
    code, arch, _ = build(machine)
    forbidden = seccomp.numbers(seccomp._FORBIDDEN, machine)
    assert len(forbidden) > 60
    assert {verdict(code, arch, number) for number in forbidden.values()} == {ERRNO | errno.EPERM}
    assert {verdict(code, arch, number) for number in PLAIN[machine].values()} == {ALLOW}


@pytest.mark.parametrize("machine", MACHINES)
def test_another_architecture_kills_and_numbers_beyond_the_table_are_absent(machine: str) -> None:
    code, arch, guarded = build(machine)
    assert verdict(code, 0x40000003, 0) == KILL
    for number in (guarded["clone3"], seccomp.NEWEST + 1, 0x40000000, 0xFFFFFFFF):
        assert verdict(code, arch, number) == ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_clone_may_fork_and_thread_but_make_no_namespace(machine: str) -> None:
    code, arch, guarded = build(machine)
    assert verdict(code, arch, guarded["clone"], 0x003D0F00) == ALLOW  # what pthread_create asks for
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(code, arch, guarded["clone"], flag | 17) == ERRNO | errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_only_unix_sockets_are_made_and_where_asked_none(machine: str) -> None:
    code, arch, guarded = build(machine)
    assert verdict(code, arch, guarded["socket"], 1) == ALLOW
    for family in (2, 10, 16, 17, 38):
        assert verdict(code, arch, guarded["socket"], family) == ERRNO | errno.EACCES
    code, arch, _ = build(machine, sockets=False)
    assert verdict(code, arch, guarded["socket"], 1) == ERRNO | errno.EACCES


@pytest.mark.parametrize("machine", MACHINES)
def test_leaving_the_group_is_pretended_only_where_the_group_is_what_is_killed(machine: str) -> None:
    code, arch, guarded = build(machine)
    assert verdict(code, arch, guarded["setsid"]) == ALLOW
    code, arch, _ = build(machine, own_groups=False)
    assert verdict(code, arch, guarded["setsid"]) == verdict(code, arch, guarded["setpgid"]) == ERRNO


@pytest.mark.parametrize("machine", MACHINES)
def test_outliving_the_server_and_typing_into_terminals_are_refused(machine: str) -> None:
    code, arch, guarded = build(machine)
    assert verdict(code, arch, guarded["prctl"], 1) == ERRNO | errno.EPERM
    assert verdict(code, arch, guarded["prctl"], 15) == ALLOW  # naming a thread
    assert verdict(code, arch, guarded["ioctl"], 0, 0x5412) == ERRNO | errno.EPERM
    assert verdict(code, arch, guarded["ioctl"], 0, 0x5413) == ALLOW  # a terminal's size


@pytest.mark.parametrize("machine", MACHINES)
def test_limits_and_priorities_of_others_are_refused_where_no_namespace_hides_them(machine: str) -> None:
    code, arch, _ = build(machine, own_groups=False)
    open_, _, _ = build(machine)
    for argument, table in seccomp._OF_ANOTHER.items():
        for number in seccomp.numbers(table, machine).values():
            for pid, wanted in ((0, ALLOW), (4321, ERRNO | errno.EPERM)):
                assert verdict(code, arch, number, *[7] * argument, pid) == wanted
                assert verdict(open_, arch, number, *[7] * argument, pid) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_a_stem_may_clone_into_one_set_of_namespaces_and_no_other(machine: str) -> None:
    guarded = seccomp.numbers(seccomp._GUARDED, machine)
    code = seccomp.build_filter(machine, sockets=True, own_groups=True, clone=0x30020011)
    arch = seccomp.AUDIT_ARCH[machine]
    assert verdict(code, arch, guarded["clone"], 0x30020011) == ALLOW
    for flags in (0x30020000, 0x10000011, 0x70020011, 0x30020111, 0x20000011, 0x00020011):
        assert verdict(code, arch, guarded["clone"], flags) == ERRNO | errno.EPERM
