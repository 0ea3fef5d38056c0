"""A register of people, as a window: the program that is worked with on the desktop of `desk`. It imports nothing of ours.

    python register.py PEOPLE.json

Shows the records {name, phone, city, member} of a file, changes, adds and deletes them. `Save` and a confirmed `Delete`
write the file, whole; nothing else does. Where DESK_TREES names a folder, a socket there, named by the process, tells what is
on the window to who connects: once all that was clicked and typed so far has been taken in and drawn.
"""

import contextlib
import json
import os
import socket
import sys
import tkinter
from pathlib import Path
from typing import Any

CITIES = ("Bergen", "Cadiz", "Lublin", "Tartu")  # those of chores.py
_LONGEST = 60  # letters of a field
_FONT = ("Helvetica", 12)
_ROLES = {
    "Listbox": "list",
    "Entry": "text",
    "Button": "push-button",
    "Radiobutton": "radio-button",
    "Checkbutton": "check-box",
    "Label": "label",
}


class Register:
    """The window and the records behind it."""

    def __init__(self, path: str):
        self.path = Path(path)
        self.people: list[dict[str, Any]] = json.loads(self.path.read_text())
        self.current: int | None = None  # whose record is in the fields; None is a new one
        self.root = tkinter.Tk()
        self.root.title(f"Register - {self.path.name}")
        self.root.geometry("800x600+0+0")
        self.root.option_add("*Font", _FONT)
        self.question: tkinter.Toplevel | None = None
        self.status = tkinter.StringVar(value="Choose a person, or press New.")
        self.name, self.phone, self.city = (tkinter.StringVar() for _ in range(3))
        self.member = tkinter.BooleanVar()
        self.list = tkinter.Listbox(self.root, exportselection=False, activestyle="none")
        self.list.place(x=20, y=20, width=240, height=500)
        self.list.bind("<<ListboxSelect>>", lambda event: self.choose())
        self.entries = [self.field("Name", self.name, 20), self.field("Phone", self.phone, 70)]
        tkinter.Label(self.root, text="City").place(x=290, y=130)
        for number, city in enumerate(CITIES):
            choice = tkinter.Radiobutton(self.root, text=city, value=city, variable=self.city)
            choice.place(x=380 + 100 * (number % 2), y=125 + 40 * (number // 2))
        tkinter.Checkbutton(self.root, text="Member", variable=self.member).place(x=380, y=220)
        for number, (text, command) in enumerate((("New", self.new), ("Save", self.save), ("Delete", self.ask))):
            tkinter.Button(self.root, text=text, command=command).place(x=290 + 110 * number, y=290, width=100, height=40)
        tkinter.Label(self.root, textvariable=self.status, anchor="w").place(x=20, y=550, width=760)
        self.show()

    def field(self, label: str, variable: tkinter.StringVar, y: int) -> tkinter.Entry:
        tkinter.Label(self.root, text=label).place(x=290, y=y + 5)
        entry = tkinter.Entry(self.root, textvariable=variable)
        entry.place(x=380, y=y, width=380, height=36)
        entry.bind("<Control-a>", lambda event: self.select(entry))
        entry.bind("<Return>", lambda event: self.save())
        return entry

    def select(self, entry: tkinter.Entry) -> str:
        entry.selection_range(0, "end")
        entry.icursor("end")
        return "break"

    # ------------------------------------------------------------------ what the buttons do

    def show(self) -> None:
        """The list again, and the fields of who is chosen."""
        self.list.delete(0, "end")
        for person in self.people:
            self.list.insert("end", person["name"])
        person = {"name": "", "phone": "", "city": CITIES[0], "member": False}
        if self.current is not None:
            person = self.people[self.current]
            self.list.selection_set(self.current)
        for variable, key in ((self.name, "name"), (self.phone, "phone"), (self.city, "city")):
            variable.set(person[key])
        self.member.set(person["member"])

    def choose(self) -> None:
        chosen = self.list.curselection()
        self.current = chosen[0] if chosen else None
        self.show()
        self.status.set("Change the fields and press Save.")

    def new(self) -> None:
        self.current = None
        self.show()
        self.status.set("Fill in the fields and press Save.")

    def save(self) -> None:
        name, phone = (variable.get().strip()[:_LONGEST] for variable in (self.name, self.phone))
        if not name or not phone:
            self.status.set("Not saved: a name and a phone are needed.")
            return
        person = {"name": name, "phone": phone, "city": self.city.get(), "member": self.member.get()}
        if self.current is None:
            self.people.append(person)
            self.current = len(self.people) - 1
        else:
            self.people[self.current] = person
        self.write(f"Saved {name}.")

    def ask(self) -> None:
        if self.current is None or self.question is not None:
            self.status.set("Choose who is to be deleted.")
            return
        top = self.question = tkinter.Toplevel(self.root)
        top.title("Delete?")
        top.geometry("360x140+220+230")
        tkinter.Label(top, text=f"Delete {self.people[self.current]['name']}?").place(x=20, y=20)
        tkinter.Button(top, text="Yes, delete", command=lambda: self.answer(True)).place(x=20, y=80, width=150, height=40)
        tkinter.Button(top, text="No, keep", command=lambda: self.answer(False)).place(x=190, y=80, width=150, height=40)
        top.wait_visibility()
        top.grab_set()

    def answer(self, yes: bool) -> None:
        if self.question is not None:
            self.question.destroy()
            self.question = None
        if yes and self.current is not None:
            gone = self.people.pop(self.current)
            self.current = None
            self.write(f"Deleted {gone['name']}.")

    def write(self, said: str) -> None:
        draft = self.path.with_name(self.path.name + ".new")
        draft.write_text(json.dumps(self.people, indent=1))
        draft.replace(self.path)
        self.show()
        self.status.set(said)

    # ------------------------------------------------------------------ what is on the screen, for who cannot see

    def listen(self, folder: str) -> None:
        line = socket.socket(socket.AF_UNIX)
        line.bind(str(Path(folder) / str(os.getpid())))
        line.listen(8)
        self.root.createfilehandler(line, tkinter.READABLE, lambda source, mask: self.tell(line))

    def tell(self, line: socket.socket) -> None:
        asked = line.accept()[0]
        with asked, contextlib.suppress(OSError):
            self.root.update()
            self.root.winfo_pointerxy()  # an answer of the server: what was drawn before is on the screen
            asked.sendall(json.dumps({"role": "application", "name": "register", "children": self.windows()}).encode())

    def windows(self) -> list[dict[str, Any]]:
        tops: list[Any] = [self.root, *([self.question] if self.question is not None else [])]
        return [
            {**place(top), "role": "dialog" if top is self.question else "frame", "name": top.title(), "children": inside(top)}
            for top in tops
        ]


def place(widget: Any) -> dict[str, Any]:
    return {
        "x": widget.winfo_rootx(),
        "y": widget.winfo_rooty(),
        "width": widget.winfo_width(),
        "height": widget.winfo_height(),
        "states": ["enabled", "visible", "showing"] if widget.winfo_viewable() else ["enabled"],
    }


def inside(window: Any) -> list[dict[str, Any]]:
    """What a window holds, each with its role, name, text, place and states."""
    found = []
    named = ""  # by the label before it
    for widget in window.winfo_children():
        kind = widget.winfo_class()
        if kind == "Toplevel":
            continue
        node = {**place(widget), "role": _ROLES[kind], "name": "", "text": "", "children": []}
        if kind == "Entry":
            node |= {"name": named, "text": widget.get()}
            node["states"].append("editable")
        elif kind == "Listbox":
            node |= {"name": "People", "children": items(widget)}
        else:
            node["name"] = named = str(widget.cget("text"))
        if kind in ("Radiobutton", "Checkbutton") and str(widget.getvar(str(widget.cget("variable")))) in (
            ("1", "True") if kind == "Checkbutton" else (str(widget.cget("value")),)
        ):
            node["states"].append("checked")
        if widget.focus_get() is widget and kind == "Entry":
            node["states"].append("focused")
        found.append(node)
    return found


def items(widget: Any) -> list[dict[str, Any]]:
    found = []
    for number in range(widget.size()):
        box = widget.bbox(number)  # None of what is scrolled away
        if box is None:
            continue
        x, y = widget.winfo_rootx() + box[0], widget.winfo_rooty() + box[1]
        states = ["enabled", "visible", "showing", *(["selected"] if widget.selection_includes(number) else [])]
        size = {"width": max(widget.winfo_width() - 2 * box[0], 1), "height": box[3]}
        found.append({"role": "list-item", "name": widget.get(number), "x": x, "y": y, **size, "states": states})
    return found


def main() -> None:
    register = Register(sys.argv[1])
    if folder := os.environ.get("DESK_TREES"):
        register.listen(folder)
    register.root.mainloop()


if __name__ == "__main__":
    main()
