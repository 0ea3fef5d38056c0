"""How hypothesis draws here: the same examples on every machine, and no clock over them."""

from hypothesis import settings

drawn = settings(deadline=None, derandomize=True, database=None, max_examples=100)
