"""A customer who follows a script: says what they want, tells a fact only when asked for it, agrees only to what they want.

There is no model in it, so it costs nothing, says the same for the same seed, and cannot be talked into anything. It reads a
clerk's message sentence by sentence: what is asked for, whether something is proposed, whether something is refused.
"""

from __future__ import annotations

import random
import re
from typing import Any

from jaxagent.envs.shops.wishes import Wish

PATIENCE = 3  # messages about one wish that lead nowhere
_READ_CHARS = 4000  # of a message
_MOST_NUMBERS = 3  # in an answer to a question, beside the one wanted: an item's price, say
_COUNTED = "how_many"  # the question with few possible answers: who says two of them has not answered
_SENTENCE = re.compile(r"(?<=[.?!\n])\s+")
_ASKED = re.compile(r"\?|\b(please|tell me|give me|share|provide|i need|could you|let me know)\b")
_TOPICS = {
    "identity": re.compile(r"\be-?mail|\bnames?\b|\bzip\b|\bidentif|\bverify\b|\bwho\b"),
    "order": re.compile(r"\border\b|\borders\b"),
    "item": re.compile(r"\bitems?\b|\bproducts?\b|\bwhich part"),
    "option": re.compile(r"\boptions?\b|\bvariants?\b|\bversions?\b|\bcolou?rs?\b|\bsizes?\b|\binstead\b|\breplace"),
    "reason": re.compile(r"\breasons?\b|\bwhy\b"),
    "payment": re.compile(r"\bpay\b|\bpayments?\b|\brefund|\bcards?\b|\bmoney\b"),
    "address": re.compile(r"\baddress|\bstreet\b|\bwhere\b"),
}
_PROPOSED = re.compile(
    r"\bconfirm|\bproceed\b|\bgo ahead\b|\byes\b|\bshall i\b|\bshould i\b|\bwould you like me to\b|\bdo you want me to\b"
    r"|\bis (?:that|this|it) (?:right|correct|ok|okay|fine)\b"
)
_REFUSED = re.compile(
    r"\bcan ?not\b|\bcan't\b|\bunable\b|\bnot able\b|\bnot possible\b|\bimpossible\b|\bnot allowed\b|\bnot permitted\b"
    r"|\bmust refuse\b|\bnot eligible\b"
)
_NUMBER = re.compile(r"(?<![\w#.])\d[\d,]*(?:\.\d+)?(?![\w])")
_DENIED = re.compile(rf"(?:\bnot|n't)\s(?:\w{{1,20}}\s)?[^\w\s]?({_NUMBER.pattern})")


class Customer:
    """One customer. Args: user: a row of `users`; voice: draws among ways to say the same."""

    def __init__(self, user: dict[str, Any], wishes: list[Wish], voice: random.Random):
        self.user, self.wishes, self.voice = user, wishes, voice
        self.number = 0  # of the wish that is talked about
        self.met = 0  # wishes that were fulfilled, answered or rightly refused
        self.agreed = self.changed = False  # to this wish's proposal; a change has been made since
        self.told: set[str] = set()
        self.misses = 0

    @property
    def wish(self) -> Wish:
        return self.wishes[self.number]

    def open(self) -> str:
        return f"{self.voice.choice(('Hello.', 'Hi!', 'Good day.'))} {self.voice.choice(self.wish.openings)}"

    def hear(self, message: str, read: set[tuple[str, str]]) -> str:
        """The answer to a clerk's message, or nothing where the customer leaves: because all is settled, or in anger.

        Args: read: the calls that the clerk has made, as name and id.
        """
        words = message[:_READ_CHARS].lower().replace("’", "'").replace("_", " ")
        if self.changed or self._answered(words, read):
            return self._next("Thank you.")
        refused = bool(_REFUSED.search(words))
        if refused and self._rightly_refused(read):
            return self._next("That is a pity.")
        asked = self._asked(words)
        lacking = [ways for ways in self.wish.named if not any(_says(words, way.lower()) for way in ways)]
        proposed = bool(_PROPOSED.search(words)) and bool(self.wish.named)
        if proposed and not lacking:
            self.agreed, self.misses = True, 0
            return self.voice.choice(("Yes, please.", "Yes, do that.", "Yes."))
        if asked:
            return self._tell(asked)
        if proposed:
            return self._missed("I do not know yet what exactly you will do. Say which order, what of it, and how.")
        if refused:
            return self._missed("Have you really looked at it? I want it all the same.")
        if self.wish.answer and _NUMBER.search(words):
            return self._missed("I want one number, the right one.")
        return self._missed(self.voice.choice(self.wish.openings))

    def _asked(self, words: str) -> list[str]:
        """The topics that a message asks for."""
        sentences = [one for one in _SENTENCE.split(words) if _ASKED.search(one)]
        return [topic for topic, pattern in _TOPICS.items() if any(pattern.search(one) for one in sentences)]

    def _tell(self, topics: list[str]) -> str:
        """What was asked for and is not told yet comes first; who asks again is told again, and loses patience."""
        facts = dict(self.wish.facts)
        user = self.user
        facts["identity"] = f"I am {user['first_name']} {user['last_name']}, zip {user['zip']}, e-mail {user['email']}."
        known = [topic for topic in topics if topic in facts]
        if not known or set(known) <= self.told:
            said = " ".join(facts[topic] for topic in known) or "I do not know what to say to that."
            return self._missed(said)
        self.told |= set(known)
        self.misses = 0
        return " ".join(facts[topic] for topic in known)

    def _answered(self, words: str, read: set[tuple[str, str]]) -> bool:
        """Whether a question's number was said, by who had looked, neither among many nor as what it is not."""
        if not self.wish.answer or not set(self.wish.reads) <= read:
            return False
        numbers, denied = (
            {float(number.replace(",", "")) for number in pattern.findall(words)} for pattern in (_NUMBER, _DENIED)
        )
        most = 1 if self.wish.kind == _COUNTED else _MOST_NUMBERS
        return float(self.wish.answer) in numbers - denied and len(numbers) <= most

    def _rightly_refused(self, read: set[tuple[str, str]]) -> bool:
        wish = self.wish
        due = wish.call is None and not wish.answer
        return due and set(wish.reads) <= read and set(wish.needs) <= self.told

    def _next(self, said: str) -> str:
        self.met, self.number = self.met + 1, self.number + 1
        self.agreed = self.changed = False
        self.told &= {"identity"}
        self.misses = 0
        return f"{said} {self.voice.choice(self.wish.openings)}" if self.number < len(self.wishes) else ""

    def _missed(self, said: str) -> str:
        self.misses += 1
        return said if self.misses < PATIENCE else ""


def _says(words: str, way: str) -> bool:
    """Whether a text has `way` as words of its own: the size "s" is neither in "send" nor in "let's", "8" not in "8.5"."""
    return bool(re.search(rf"(?<!\w)(?<!\w')(?<!\d[.,]){re.escape(way)}(?!\w|[.,]\d)", words))
