"""A desktop behind OSWorld's guest protocol: Xvfb, xdotool and programs of ours. It imports nothing of ours.

    python -P -c THIS PROGRAMS_AS_JSON WIDTH HEIGHT          standard input is a socket that listens

It is meant for the inside of a lock (`local.py`): commands that a task brings are run. What pyautogui is asked for through
`python -c` is not run but read, calls with literal arguments and nothing else, and done by xdotool. Screenshots are the frame
buffer; the accessibility tree is what the programs say of themselves. Beside the guest's own requests there is POST /restore,
which ends what was launched and empties the home folder: a snapshot, for a machine without one.
"""

import ast
import contextlib
import ctypes
import email.parser
import email.policy
import http.server
import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path
from typing import Any

NAMESPACE = "https://accessibility.ubuntu.example.org/ns/"
_PATIENCE_S = 30.0
_COMMAND_S = 120.0
_MOST_BYTES = 64 << 20  # of a request
_BUTTONS = {"left": "1", "middle": "2", "right": "3"}
_KEYS = {
    "enter": "Return",
    "return": "Return",
    "esc": "Escape",
    "escape": "Escape",
    "backspace": "BackSpace",
    "delete": "Delete",
    "tab": "Tab",
    "space": "space",
    "up": "Up",
    "down": "Down",
    "left": "Left",
    "right": "Right",
    "home": "Home",
    "end": "End",
    "pageup": "Prior",
    "pagedown": "Next",
    "ctrl": "Control_L",
    "alt": "Alt_L",
    "shift": "Shift_L",
    "insert": "Insert",
    "win": "Super_L",
    "capslock": "Caps_Lock",
    "printscreen": "Print",
    "!": "exclam",
    '"': "quotedbl",
    "#": "numbersign",
    "$": "dollar",
    "%": "percent",
    "&": "ampersand",
    "'": "apostrophe",
    "(": "parenleft",
    ")": "parenright",
    "*": "asterisk",
    "+": "plus",
    ",": "comma",
    "-": "minus",
    ".": "period",
    "/": "slash",
    ":": "colon",
    ";": "semicolon",
    "<": "less",
    "=": "equal",
    ">": "greater",
    "?": "question",
    "@": "at",
    "[": "bracketleft",
    "\\": "backslash",
    "]": "bracketright",
    "^": "asciicircum",
    "_": "underscore",
    "`": "grave",
    "{": "braceleft",
    "|": "bar",
    "}": "braceright",
    "~": "asciitilde",
}
_MODIFIERS = ("Control_L", "Alt_L", "Shift_L", "Super_L")
_TREES = "DESK_TREES"


class Refused(Exception):
    """What was asked cannot be done here."""


class Machine:
    """The screen, the pointer, the programs, the files."""

    def __init__(self, programs: dict[str, str], width: int, height: int):
        self.home, self.apart = Path.home(), Path(os.environ["TMPDIR"])
        self.trees = self.apart / "trees"
        self.trees.mkdir()
        tools = self.apart / "bin"
        tools.mkdir()
        for name, source in programs.items():
            (tools / f"{name}.py").write_text(source)
            (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P {tools}/{name}.py "$@"\n')
            (tools / name).chmod(0o755)
        self.programs = set(programs)
        self.launched: list[subprocess.Popen[bytes]] = []
        read, write = os.pipe()
        self.size = (width, height)
        screen = ["-displayfd", str(write), "-screen", "0", f"{width}x{height}x24", "-fbdir", str(self.apart)]
        # Without -noreset the server begins anew whenever its last client leaves, as after every xdotool.
        command = ["Xvfb", *screen, "-nolisten", "tcp", "-nolisten", "unix", "-noreset"]
        self.server = subprocess.Popen(command, pass_fds=(write,))
        os.close(write)
        with os.fdopen(read) as line:
            display = line.readline().strip()
        if not display:
            raise SystemExit(f"Xvfb did not start: status {self.server.wait()}")
        os.environ |= {"DISPLAY": f":{display}", "PATH": f"{tools}:{os.environ['PATH']}", _TREES: str(self.trees)}
        os.environ["XDG_CACHE_HOME"] = str(self.apart / "cache")  # which outlives a restore: what is known of fonts

    # ------------------------------------------------------------------ eyes

    def screenshot(self) -> bytes:
        """The frame buffer as PNG. It is kept in the format of xwd: a header of 32-bit numbers, colours, rows."""
        dump = (self.apart / "Xvfb_screen0").read_bytes()
        head = struct.unpack(">25I", dump[:100])
        size, width, height, depth, row, colours = head[0], head[4], head[5], head[11], head[12], head[19]
        if depth != 32:
            raise Refused(f"a frame buffer of 32 bits is known, got {depth}")
        pixels = dump[size + 12 * colours :][: row * height]
        colour = bytearray(3 * (row // 4) * height)
        for channel in range(3):  # they lie as blue, green, red
            colour[channel::3] = pixels[2 - channel :: 4]
        step = 3 * (row // 4)
        lines = b"".join(b"\0" + colour[y * step : y * step + 3 * width] for y in range(height))
        parts = (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(lines, 1)),
            (b"IEND", b""),
        )
        made = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts]
        return b"\x89PNG\r\n\x1a\n" + b"".join(made)

    def tree(self) -> str:
        root = ElementTree.Element("desktop-frame", {"name": "main"})
        for place in sorted(self.trees.iterdir()):
            with contextlib.suppress(ConnectionRefusedError):  # it has ended
                root.append(element(ask(place)))
        return ElementTree.tostring(root, encoding="unicode")

    # ------------------------------------------------------------------ hands

    def execute(self, command: Any, shell: bool) -> dict[str, Any]:
        if isinstance(command, str) and not shell:
            command = shlex.split(command)
        if not shell:
            command = [str(Path(part).expanduser()) if part.startswith("~/") else part for part in command]
            if command[:2] in (["python", "-c"], ["python3", "-c"]) and len(command) == 3 and "pyautogui" in command[2]:
                self.act(command[2])
                return {"status": "success", "output": "", "error": "", "returncode": 0}
        done = subprocess.run(
            command, shell=shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_COMMAND_S
        )
        return {"status": "success", "output": done.stdout, "error": done.stderr, "returncode": done.returncode}

    def act(self, source: str) -> None:
        """Does what a program asks of pyautogui. Raises Refused for whatever else stands in it."""
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Import | ast.Assign):  # its settings
                continue
            call = statement.value if isinstance(statement, ast.Expr) else None
            called = call.func if isinstance(call, ast.Call) else None
            if (
                not isinstance(call, ast.Call)
                or not isinstance(called, ast.Attribute)
                or not isinstance(called.value, ast.Name)
            ):
                raise Refused(f"only calls of pyautogui are done here, got {ast.unparse(statement)[:80]}")
            given = [ast.literal_eval(argument) for argument in call.args]
            named = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
            if (called.value.id, called.attr) == ("time", "sleep"):
                time.sleep(min(float(given[0]), _PATIENCE_S))
            elif called.value.id == "pyautogui" and called.attr in _DONE:
                for line in _DONE[called.attr](*given, **named):
                    # Its answer to where the pointer is comes after all that it has sent was taken in.
                    self.point(*line)
            else:
                raise Refused(f"{called.value.id}.{called.attr} is not known here; known are {', '.join(sorted(_DONE))}")

    def point(self, *words: str) -> None:
        last = [] if words[0] == "type" else ["getmouselocation"]
        for command in (["xdotool", *words, *last], ["xdotool", "getmouselocation"])[: 1 if last else 2]:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
            if done.returncode:
                raise Refused(f"xdotool: {done.stderr.strip()[:200]}")

    # ------------------------------------------------------------------ programs and files

    def launch(self, command: Any, shell: bool) -> str:
        if isinstance(command, str) and not shell:
            command = shlex.split(command)
        if not shell:
            command = [str(Path(part).expanduser()) if part.startswith("~/") else part for part in command]
        child = subprocess.Popen(command, shell=shell, stdin=subprocess.DEVNULL, start_new_session=True)
        self.launched.append(child)
        if not shell and command[0] in self.programs:  # which say when they are there
            until = time.monotonic() + _PATIENCE_S
            while not (self.trees / str(child.pid)).exists():
                if child.poll() is not None or time.monotonic() > until:
                    raise Refused(f"{command[0]} did not start: status {child.poll()}")
                time.sleep(0.02)
        return f"{command if shell else ' '.join(command)} launched successfully"

    def restore(self) -> None:
        for child in self.launched:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        self.launched.clear()
        for place in self.trees.iterdir():
            place.unlink()
        for place in self.home.iterdir():
            shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
        released = [word for key in _MODIFIERS for word in ("keyup", key)]
        buttons = [word for button in _BUTTONS.values() for word in ("mouseup", button)]
        self.point(*released, *buttons, "mousemove", "0", "0")
        unlock()

    def path(self, name: str) -> Path:
        return Path(os.path.expandvars(name)).expanduser()


def place_of(x: Any, y: Any) -> list[str]:
    return [] if x is None or y is None else ["mousemove", str(round(x)), str(round(y))]


def click(x: Any = None, y: Any = None, clicks: int = 1, interval: float = 0.0, button: str = "left") -> list[list[str]]:
    times = ["--repeat", str(int(clicks)), "--delay", "40"] if clicks > 1 else []
    return [[*place_of(x, y), "click", *times, _BUTTONS[button]]]


def drag(x: float, y: float, duration: float = 0.0, *ignored: Any, button: str = "left") -> list[list[str]]:
    which = _BUTTONS[button]
    near = place_of(x - 1 if x else x + 1, y)  # programs want to see it move
    return [["mousedown", which], near, place_of(x, y), ["mouseup", which]]


def scroll(clicks: float, x: Any = None, y: Any = None) -> list[list[str]]:
    return [[*place_of(x, y), "click", "--repeat", str(abs(int(clicks)) or 1), "--delay", "20", "4" if clicks > 0 else "5"]]


def write(message: str, interval: float = 0.0) -> list[list[str]]:
    return [["type", "--delay", "4", "--", message]] if message else []


def key(name: str) -> str:
    """The X server's name of pyautogui's key."""
    name = str(name).lower()
    if name in _KEYS:
        return _KEYS[name]
    if len(name) == 1 and name.isascii() and name.isalnum():
        return name
    if name[:1] == "f" and name[1:].isdigit():
        return name.upper()
    raise Refused(f"no key {name!r} here")


def press(keys: Any, presses: int = 1, interval: float = 0.0) -> list[list[str]]:
    names = [keys] if isinstance(keys, str) else list(keys)
    return [["key", "--delay", "4", key(name)] for _ in range(int(presses)) for name in names]


_DONE: dict[str, Any] = {
    "moveTo": lambda x=None, y=None, *ignored, **also: [place_of(x, y) or ["getmouselocation"]],
    "click": click,
    "doubleClick": lambda x=None, y=None, **also: click(x, y, 2, **also),
    "tripleClick": lambda x=None, y=None, **also: click(x, y, 3, **also),
    "rightClick": lambda x=None, y=None: click(x, y, button="right"),
    "middleClick": lambda x=None, y=None: click(x, y, button="middle"),
    "dragTo": drag,
    "scroll": scroll,
    "typewrite": write,
    "write": write,
    "press": press,
    "hotkey": lambda *names: [["key", "--delay", "4", "+".join(map(key, names))]],
    "keyDown": lambda name: [["keydown", key(name)]],
    "keyUp": lambda name: [["keyup", key(name)]],
}


def unlock() -> None:
    """No Caps Lock, whether it was on or not: xdotool can only press it."""
    xlib, core_keyboard, every_modifier = ctypes.CDLL("libX11.so.6"), 0x100, 0xFF
    xlib.XOpenDisplay.restype = ctypes.c_void_p
    display = ctypes.c_void_p(xlib.XOpenDisplay(None))
    if not display:
        raise Refused("the X server is not there")
    xlib.XkbLockModifiers(display, core_keyboard, every_modifier, 0)
    xlib.XCloseDisplay(display)


def ask(place: Path) -> dict[str, Any]:
    """What a program says of its windows."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_PATIENCE_S)
        line.connect(str(place))
        parts = []
        while part := line.recv(1 << 16):
            parts.append(part)
    said: dict[str, Any] = json.loads(b"".join(parts))
    return said


def element(node: dict[str, Any]) -> ElementTree.Element:
    """A node as AT-SPI's are told: states, place and size in namespaces of their own."""
    about = {"name": clean(node["name"]), **{f"{{{NAMESPACE}state}}{state}": "true" for state in node.get("states", ())}}
    if "x" in node:
        about[f"{{{NAMESPACE}component}}screencoord"] = f"({node['x']}, {node['y']})"
        about[f"{{{NAMESPACE}component}}size"] = f"({node['width']}, {node['height']})"
    made = ElementTree.Element(node["role"], about)
    made.text = clean(node.get("text", "")) or None
    made.extend(element(child) for child in node.get("children", ()))
    return made


def clean(text: str) -> str:
    """Without what XML cannot hold."""
    return "".join(letter for letter in text if letter.isprintable())


class Server(http.server.ThreadingHTTPServer):
    """Behind the lock no socket of another kind can be made; the one that is listened on comes from outside."""

    address_family = socket.AF_UNIX
    daemon_threads = True


class Door(http.server.BaseHTTPRequestHandler):
    """The guest's HTTP; requests are served one at a time."""

    machine: Machine
    turn = threading.Lock()
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece: two would wait for each other's acknowledgement
    disable_nagle_algorithm = True

    def log_message(self, *ignored: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.serve("GET")

    def do_POST(self) -> None:
        self.serve("POST")

    def serve(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > _MOST_BYTES:
            self.close_connection = True  # what is not read must not be taken for the next request
            self.say(413, {"status": "error", "message": f"a request of more than {_MOST_BYTES >> 20} MiB"})
            return
        self.body = self.rfile.read(length)
        asked = f"{method} {self.path.partition('?')[0]}"
        serve = _SERVED.get(asked)
        if serve is None:
            self.say(404, {"status": "error", "message": f"{asked} is not known here"})
            return
        try:
            with self.turn:
                said = serve(self)
        except (Refused, OSError, ValueError, KeyError, TypeError, SyntaxError, subprocess.SubprocessError) as error:
            self.say(500, {"status": "error", "message": f"{type(error).__name__}: {error}"})
        else:
            self.say(*said)

    def say(self, status: int, said: Any) -> None:
        kind, content = ("application/octet-stream", said) if isinstance(said, bytes) else ("text/html; charset=utf-8", said)
        if isinstance(said, dict):
            kind, content = "application/json", json.dumps(said)
        if status == 200 and self.path == "/screenshot":
            kind = "image/png"
        data = content if isinstance(content, bytes) else content.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    @property
    def json(self) -> dict[str, Any]:
        asked = json.loads(self.body)
        if not isinstance(asked, dict):
            raise ValueError("an object was wanted")
        return asked

    def execute(self) -> tuple[int, Any]:
        return 200, self.machine.execute(self.json.get("command", []), bool(self.json.get("shell", False)))

    def launch(self) -> tuple[int, Any]:
        return 200, self.machine.launch(self.json.get("command", []), bool(self.json.get("shell", False)))

    def file(self) -> tuple[int, Any]:
        path = self.machine.path(urllib.parse.parse_qs(self.body.decode())["file_path"][0])
        return (200, path.read_bytes()) if path.is_file() else (404, {"error": "File not found"})

    def upload(self) -> tuple[int, Any]:
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        form = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + self.body)
        parts: dict[str, bytes] = {}
        for part in form.iter_parts():
            content = part.get_payload(decode=True)
            parts[str(part.get_param("name", header="content-disposition"))] = content if isinstance(content, bytes) else b""
        path = self.machine.path(parts["file_path"].decode())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(parts["file_data"])
        return 200, f"File Uploaded: {len(parts['file_data'])} bytes"

    def restore(self) -> tuple[int, Any]:
        self.machine.restore()
        return 200, {"status": "success"}


_SERVED: dict[str, Any] = {
    "GET /platform": lambda door: (200, "Linux"),
    "GET /terminal": lambda door: (200, {"output": None, "status": "success"}),
    "GET /screenshot": lambda door: (200, door.machine.screenshot()),
    "GET /accessibility": lambda door: (200, {"AT": door.machine.tree()}),
    "POST /screen_size": lambda door: (200, dict(zip(("width", "height"), door.machine.size, strict=True))),
    "POST /execute": Door.execute,
    "POST /setup/execute": Door.execute,
    "POST /setup/launch": Door.launch,
    "POST /setup/upload": Door.upload,
    "POST /file": Door.file,
    "POST /restore": Door.restore,
}


def main() -> None:
    Door.machine = Machine(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    server = Server("", Door, bind_and_activate=False)  # type: ignore[arg-type]
    server.socket.close()
    server.socket = socket.socket(fileno=os.dup(0))
    server.serve_forever()


if __name__ == "__main__":
    main()
