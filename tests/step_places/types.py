"""A module of the user's that is called as one of Python's."""

SCALE = 1.0
