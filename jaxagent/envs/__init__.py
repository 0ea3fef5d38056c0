"""Worlds. One file per world; the file's name is its name. A world out of tree is named by its dotted module."""
