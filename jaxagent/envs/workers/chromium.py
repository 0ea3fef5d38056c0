"""The browser of the system: where it is and of which version.

A driver speaks to browsers of its own major version alone, so that the environment of a world in a browser is made for the one
that is here, and made anew when that is another. JAXAGENT_CHROMIUM names one that is not in PATH.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_VERSION = re.compile(r"\b(\d+)\.\d+\.\d+\.\d+\b")
_SOON_S = 60.0


def find() -> str:
    """The path of the browser. Raises ValueError where there is none."""
    named = os.environ.get("JAXAGENT_CHROMIUM", "")
    found = (shutil.which(name) for name in ([named] if named else NAMES))
    if path := next(filter(None, found), None):
        return path
    if named:
        raise ValueError(f"it needs the program chromium, and JAXAGENT_CHROMIUM={named} is no program")
    raise ValueError(
        f"it needs the program chromium, and none of {', '.join(NAMES)} is in PATH; install one, as in apt install chromium, "
        "or name it: JAXAGENT_CHROMIUM=/path/to/chromium"
    )


def major() -> str:
    """The major version of the browser, as in 156. Raises ValueError where there is none, or it does not say."""
    return _major(find())


@functools.cache
def _major(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_SOON_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"it needs the program chromium, and {path} --version cannot be run: {error}") from None
    if found := _VERSION.search(done.stdout):
        return found[1]
    raise ValueError(f"it needs the program chromium, and {path} --version says {done.stdout.strip()[:80]!r}, which names none")
