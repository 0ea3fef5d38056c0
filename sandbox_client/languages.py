"""Which languages this host can run besides Python, and the commands that compile and run each.

A language is here only if all its tools are, at places that a locked child can see. Names are SandboxFusion's.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Language:
    """A program is written to `file`, compiled where `compile` says how, and run; the first words are tools.

    `address_bytes`: what its runtime reserves without using it; a limit on address space must leave room for that.
    `libraries`: where its tools have theirs. They look for them beside themselves, which takes a /proc to know.
    """

    name: str
    file: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    other_names: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    address_bytes: int = 0
    libraries: str = ""


_JAVA = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m", "-Xshare:auto", "-XX:CompressedClassSpaceSize=64m")
_KNOWN = (
    Language("bash", "main.sh", ("bash", "main.sh")),
    Language("nodejs", "main.js", ("node", "main.js"), other_names=("javascript", "node"), address_bytes=4 << 30),
    Language("c", "main.c", ("./main",), ("gcc", "-O2", "-o", "main", "main.c", "-lm"), tools=("as", "ld")),
    Language("cpp", "main.cpp", ("./main",), ("g++", "-O2", "-o", "main", "main.cpp"), ("c++",), tools=("as", "ld")),
    Language("go", "main.go", ("./main",), ("go", "build", "-o", "main", "main.go"), address_bytes=4 << 30),
    Language("java", "Main.java", ("java", *_JAVA, "Main.java"), tools=("javac",), address_bytes=4 << 30),
    Language(
        "rust",
        "main.rs",
        ("./main",),
        ("rustc", "-O", "-Clink-arg=-fuse-ld=bfd", "-o", "main", "main.rs"),
        tools=("cc", "ld.bfd"),
        address_bytes=4 << 30,
    ),
    Language("perl", "main.pl", ("perl", "main.pl")),
    Language("ruby", "main.rb", ("ruby", "main.rb"), address_bytes=2 << 30),
    Language("php", "main.php", ("php", "main.php")),
    Language("lua", "main.lua", ("lua", "main.lua")),
    Language("R", "main.R", ("Rscript", "--vanilla", "main.R"), address_bytes=4 << 30),
)


def toolchains() -> list[str]:
    """Returns the directories of compilers that live in a user's home, to be shown to locked children too."""
    found = []
    compiler = shutil.which("rustc")
    if compiler and not compiler.startswith("/usr/"):  # a proxy that picks one of several
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            told = subprocess.run([compiler, "--print", "sysroot"], capture_output=True, text=True, timeout=10, check=True)
            found.append(told.stdout.strip())
    return [path for path in found if Path(path, "bin").is_dir()]


def _seen(tool: str, path: str, readable: Sequence[str]) -> str | None:
    """Returns where a locked child finds `tool`, None where it does not."""
    if tool.startswith("./"):
        return tool
    place = shutil.which(tool, path=path)
    if place is None:
        return None
    real = str(Path(place).resolve())
    if not any(f"{real}/".startswith(f"{open_}/") for open_ in readable):
        return None
    return place if Path(real).parent in (Path("/usr/bin"), Path("/usr/local/bin")) else real


def find(path: str, readable: Iterable[str], address_bytes: int) -> dict[str, Language]:
    """Returns name -> language of those that run here, their tools as absolute paths.

    Args:
      path: the PATH of a locked child
      readable: what it may read of the host
      address_bytes: the most address space that one of its processes may reserve
    """
    places = [str(Path(place).resolve()) for place in readable]
    found = {}
    for language in _KNOWN:
        first = [words[0] for words in (language.compile, language.run) if words]
        where = {tool: _seen(tool, path, places) for tool in (*first, *language.tools)}
        if language.address_bytes > address_bytes or None in where.values():
            continue
        homes = [str(Path(place).parents[1]) for place in where.values() if place and place.startswith("/")]
        own = dict.fromkeys(f"{home}/lib" for home in homes if home not in ("/usr", "/usr/local", "/"))
        run, compile_ = ((str(where[words[0]]), *words[1:]) if words else () for words in (language.run, language.compile))
        for name in (language.name, *language.other_names):
            found[name] = replace(language, run=run, compile=compile_, libraries=":".join(own))
    return found
