"""What a function's code reads from outside, as far as its bytecode shows.

That is: global names with the attributes that follow them (``F.relu``, ``config.depth``), names of
attributes of anything, strings (an attribute's name for ``getattr``), and modules that it imports.
"""

from __future__ import annotations

import dis
import functools
import re
from dataclasses import dataclass
from types import CodeType

from lazyxla.steps import trust
from lazyxla.steps.trust import Unfit

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_VARIABLE = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", *_GLOBAL)
_CONSTANT = ("LOAD_CONST", "LOAD_SMALL_INT")
MAKE_TEXT = ("repr", "str", "ascii", "format", "format_map", "mod", "__mod__", "__rmod__")
"""What makes text of objects, by methods of theirs that are..."""
TEXTS = ("__repr__", "__str__", "__format__")
FORMAT = ("format", "format_map")
"""Methods of strings by which these name attributes: ``"{0.depth}".format(config)``."""
# Methods that Python and its library call by name: `dict(x)` or `f(**x)`, and contextlib.closing.
_CALLED_BY_NAME = ("keys", "close")
_UNSEEN = ("EXTENDED_ARG", "CACHE")


@dataclass(frozen=True)
class Reads:
    """What a piece of code reads."""

    chains: frozenset[tuple[str, ...]]  # a global name, then attributes
    imports: frozenset[str]  # modules that it imports
    names: frozenset[str]  # of attributes, and strings
    dynamic: bool  # it reads attributes whose names it makes up


@functools.lru_cache(maxsize=4096)
def reads_of(code: CodeType) -> Reads:
    """What code and the functions within it read.

    Raises:
        Unfit: it assigns to globals, makes a class, or imports what is not trusted.
    """
    chains: set[tuple[str, ...]] = set()
    imports: set[str] = set()
    names = {*names_of(code), *_CALLED_BY_NAME}
    dynamic = not _strings(code.co_consts).isdisjoint(FORMAT)
    if not names.isdisjoint(MAKE_TEXT):
        names.update(TEXTS)
    found = [i for i in dis.get_instructions(code) if i.opname not in _UNSEEN]
    for position, instruction in enumerate(found):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise Unfit(f"it assigns to the global {instruction.argval}")
        if instruction.opname == "IMPORT_NAME":
            module, level = instruction.argval, found[position - 2].argval
            if level or not trust.is_trusted(module):
                raise Unfit(f"it imports {'.' * level}{module}")
            imports |= {module, module.partition(".")[0]}  # it may bind the outer one
        if instruction.opname == "MATCH_CLASS" and instruction.arg:
            dynamic = True  # the class names the attributes
        if instruction.opname.startswith("FORMAT_") or _may_format(found, position):
            names.update(TEXTS)
        if instruction.opname in _ATTRIBUTE and instruction.argval in FORMAT:
            template = found[position - 1]
            if template.opname == "LOAD_CONST" and isinstance(template.argval, str):
                names.update(re.findall(r"\w+", template.argval))
            else:
                dynamic = True
        if instruction.opname in _GLOBAL:
            chain = [instruction.argval]
            for following in found[position + 1 :]:
                if following.opname not in _ATTRIBUTE:
                    break
                chain.append(following.argval)
            chains.add(tuple(chain))
            if chain[0] in trust.DYNAMIC and not _has_constant_name(found[position + 1 :]):
                dynamic = True
        elif instruction.opname.startswith("LOAD_FROM_DICT") or instruction.opname == (
            "LOAD_BUILD_CLASS"
        ):
            raise Unfit("it makes a class")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = reads_of(constant)
            chains |= inner.chains
            imports |= inner.imports
            names |= inner.names
            dynamic = dynamic or inner.dynamic
    return Reads(frozenset(chains), frozenset(imports), frozenset(names), dynamic)


def _may_format(found: list[dis.Instruction], position: int) -> bool:
    """Whether an instruction is ``%``, of text perhaps: not of a number that is written there."""
    is_percent = found[position].opname == "BINARY_OP" and found[position].argrepr in ("%", "%=")
    return is_percent and not isinstance(found[position - 1].argval, (int, float))


def _has_constant_name(following: list[dis.Instruction]) -> bool:
    """Whether what follows ``getattr`` is a call with an object, a string and perhaps a default,
    none of them computed."""
    arguments: list[object] = []
    for instruction in following:
        if instruction.opname in ("PRECALL", "CALL"):
            return len(arguments) in (2, 3) and isinstance(arguments[1], str)
        if instruction.opname in _CONSTANT:
            arguments.append(instruction.argval)
        elif instruction.opname in _VARIABLE:
            arguments.append(None)
        elif instruction.opname not in _ATTRIBUTE or len(arguments) == 2:
            return False  # something is computed
    return False


def names_of(code: CodeType) -> set[str]:
    """The names that a piece of code has, and its strings."""
    return {*code.co_names, *_strings(code.co_consts)}


def _strings(constants: tuple[object, ...]) -> set[str]:
    found: set[str] = set()
    for constant in constants:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, (tuple, frozenset)):
            found |= _strings(tuple(constant))
    return found
