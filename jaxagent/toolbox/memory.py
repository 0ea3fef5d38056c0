"""Notes that outlive the dialogue: what one phase of an episode writes, the next can read, which has nothing else."""

from __future__ import annotations

from jaxagent.toolbox.kit import Kit, Task, Workplace
from jaxagent.toolbox.retrieval import Bm25, Document
from jaxagent.tools import Tool, ToolFailed, tool


def memory(notes: int = 32, chars: int = 500, top: int = 3) -> Kit:
    """The kit `memory`. In a world of questions, tasks with a `context` then have two phases: see `envs/questions.py`.

    Args:
        notes, chars: how many notes there may be, and how long one may be: less than a context, or nothing is to be learnt.
        top: notes found by a search.
    """
    if min(notes, chars, top) < 1:
        raise ValueError(f"toolbox.memory: notes, chars and top must be at least 1, got {notes}, {chars}, {top}")

    def tools(place: Workplace, task: Task) -> list[Tool]:
        kept: dict[str, str] = {}

        async def remember(key: str, text: str) -> str:
            """Writes a note under a key, in place of one that is there."""
            if len(key) + len(text) > chars:
                raise ToolFailed(f"error: a note has at most {chars} characters with its key, this has {len(key) + len(text)}")
            if key not in kept and len(kept) == notes:
                raise ToolFailed(f"error: there are {notes} notes already; write over one of them")
            kept[key] = text
            return "noted"

        async def recall(key: str = "") -> str:
            """Reads the note under a key; without one, lists the keys."""
            if not key:
                return ", ".join(kept) or "no notes"
            if key not in kept:
                raise ToolFailed(f"error: no note {key!r}; there are {', '.join(kept) or 'none'}")
            return kept[key]

        async def search_notes(query: str) -> str:
            """Finds notes by their words."""
            found = Bm25(Document(key, key, text) for key, text in kept.items()).search(query, top)
            return "\n".join(f"[{note.id}] {note.text}" for note, _ in found) or "nothing found"

        return [tool(function) for function in (remember, recall, search_notes)]

    return Kit(tools, remembers=True)
