"""Archives sent to a session: unpacked whole, or refused for what they would do."""

import asyncio
import io
import tarfile
import time
import zipfile
from typing import Any

import pytest
from conftest import raw
from launching import Running


def zipped(files: dict[str, bytes], **more: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = more.get("mode", 0o100644) << 16
            archive.writestr(entry, content)
    return out.getvalue()


def tarred(files: dict[str, bytes], kind: bytes = tarfile.REGTYPE, mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.size, entry.linkname, entry.mode = kind, len(content), "/etc/passwd", 0o755
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def lying_tar() -> bytes:
    """An archive whose header says that a small file is a terabyte."""
    entry = tarfile.TarInfo("huge")
    entry.size = 1 << 40
    return entry.tobuf() + bytes(1024)


MANY = {f"d/{number}": b"" for number in range(1001)}
ZEROS = {f"zeros{number}": bytes(1 << 20) for number in range(30)}


@pytest.mark.parametrize(
    "make", [zipped, tarred, lambda files: tarred(files, mode="w"), lambda files: tarred(files, mode="w:xz")]
)
def test_an_archive_is_unpacked_where_it_is_wanted(server: Running, make: Any) -> None:
    async def send() -> None:
        _, opened, _ = await raw(server, "POST", "/v1/sessions", {"key": f"archive-{time.monotonic_ns()}"})
        path = f"/v1/sessions/{opened['session']}"
        files = {"a.txt": b"one", "deep/er/b.bin": bytes(range(256)), "empty": b""}
        for place, prefix in (("", ""), ("/src", "src/")):
            status, reply, _ = await raw(server, "PUT", f"{path}/archive{place}", make(files))
            assert (status, reply) == (200, {"files": 3})
            _, got, _ = await raw(server, "GET", f"{path}/files/{prefix}deep%2Fer%2Fb.bin")
            assert got["text"] == bytes(range(256))
        await raw(server, "DELETE", path)

    asyncio.run(send())


@pytest.mark.attack
@pytest.mark.parametrize(
    ("data", "told"),
    [
        (zipped(ZEROS), "20 times"),
        (tarred(ZEROS), "20 times"),
        (lying_tar(), "20 times"),
        (zipped(MANY), "1000 members"),
        (tarred(MANY), "1000 members"),
        (zipped({"../evil": b"x"}), "inside"),
        (tarred({"/evil": b"x"}), "inside"),
        (tarred({"a/../../evil": b"x"}), "inside"),
        (zipped({"link": b"/etc/passwd"}, mode=0o120777), "neither"),
        (tarred({"link": b""}, tarfile.SYMTYPE), "neither"),
        (tarred({"hard": b""}, tarfile.LNKTYPE), "neither"),
        (tarred({"device": b""}, tarfile.BLKTYPE), "neither"),
        (tarred({"sparse": b"x"}, tarfile.GNUTYPE_SPARSE), "neither"),
        (b"PK nonsense", "zip archive"),
        (b"", "archive"),
        (zipped({"a": b"b" * 99})[:-30], "zip archive"),
        (tarred({"a": bytes(9999)})[:-40], "archive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",  # gzip holds the time, which names must not
)
def test_a_bomb_or_a_liar_is_refused_and_the_session_lives(server: Running, data: bytes, told: str) -> None:
    async def send() -> None:
        _, opened, _ = await raw(server, "POST", "/v1/sessions", {"key": f"bomb-{time.monotonic_ns()}"})
        path = f"/v1/sessions/{opened['session']}"
        status, reply, _ = await raw(server, "PUT", f"{path}/archive", data)
        assert (status, reply["error"]["code"]) == (422, "archive_refused")
        assert told in reply["error"]["message"]
        look = {"seq": 1, "code": "import os; sorted(os.listdir('/box')), os.path.exists('/evil')", "timeout_s": 5}
        _, reply, _ = await raw(server, "POST", f"{path}/exec", {**look, "language": "python"})
        assert reply["value"] == "(['shm', 'tmp', 'work'], False)"
        await raw(server, "DELETE", path)

    asyncio.run(send())
