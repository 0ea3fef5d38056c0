"""Worlds in processes of their own: the program that serves them, the pool that calls it, and what must be installed."""
