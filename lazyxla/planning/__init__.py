"""How a graph that is new to the process becomes programs.

C++ asks on cache misses only, on workers, with an outline of the graph (csrc/program/planner.h):

- :mod:`history`: why it is new, compared with the graphs before, and where it is best cut;
- :mod:`alignment`: which operators of one graph correspond to those of another;
- :mod:`stages`: the cut between what is new and what is known;
- :mod:`made`: the cut between what makes tensors of no data and what uses them;
- :mod:`sizes`: the cut between what depends on sizes that are data and what does not;
- :mod:`rounds`: the cut of a graph that holds many rounds of a loop;
- :mod:`training_steps`: the cut of a graph that holds several steps of a training;
- :mod:`collectives`: the cut at collectives, and the groups of processes that run together.

C++ does the cutting (csrc/program/cut.h), and runs a graph that was cut as one flush.
"""
