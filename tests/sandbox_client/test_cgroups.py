"""The v2 layout of the memory group, made in plain directories: hosts with v1 alone must not leave it untried."""

import os
from pathlib import Path

import pytest

from sandbox_client import cgroups


def test_a_v2_base_is_limited_delegated_and_holds_a_place_for_the_zygote(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    (tmp_path / "sandbox-999999999").mkdir()  # of a server that was killed
    base = cgroups._create_in(tmp_path, f"sandbox-{os.getpid()}", 2, os.getuid())
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"
    assert (base / "cgroup.subtree_control").read_text() == "+memory"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert int((base / "memory.max").read_text()) == total // 2
    assert (base / "zygote").is_dir()
    assert not (tmp_path / "sandbox-999999999").exists()


def test_a_v2_hierarchy_without_memory_says_so(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("hugetlb")
    with pytest.raises(cgroups.CgroupError, match="no memory controller"):
        cgroups._create_in(tmp_path, "sandbox-1", 2, os.getuid())
