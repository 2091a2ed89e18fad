"""Captured steps: ``lazyxla.compile(step, capture=True)``.

A training step that has settled does the same work each time: the same operators on other values.
It is recorded once more, with all that its Python code can read noted beside it (reachable.py), and
from then on a call compares what was noted (csrc/steps/guards.h) and runs the recorded program on
what memory holds now (csrc/steps/step_program.h). No Python of the step runs and no operator is
recorded. A call for which something differs runs its Python code, and is noted anew.
"""
