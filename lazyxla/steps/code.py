"""What a function's code reads from outside, as far as its bytecode shows.

That is: global names with the attributes that follow them (``F.relu``, ``config.depth``), names of
attributes of anything, strings (an attribute's name for ``getattr``), and modules that it imports.
"""

from __future__ import annotations

import dis
import functools
from dataclasses import dataclass
from types import CodeType

from lazyxla.steps import trust
from lazyxla.steps.trust import Unfit

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_MAKE_TEXT = ("repr", "str", "format")
_TEXTS = {"__repr__", "__str__", "__format__"}
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
        Unfit: it assigns to globals, or imports what is not trusted.
    """
    chains: set[tuple[str, ...]] = set()
    imports: set[str] = set()
    names = {*code.co_names, *_strings(code.co_consts)}
    dynamic = False
    if not names.isdisjoint(_MAKE_TEXT) or any("%" in name for name in names):
        names |= _TEXTS
    found = [i for i in dis.get_instructions(code) if i.opname not in _UNSEEN]
    for position, instruction in enumerate(found):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise Unfit(f"it assigns to the global {instruction.argval}")
        if instruction.opname == "IMPORT_NAME":
            if not trust.is_trusted(instruction.argval):
                raise Unfit(f"it imports {instruction.argval}")
            imports.add(instruction.argval)
        if instruction.opname == "MATCH_CLASS" and instruction.arg:
            dynamic = True  # the class names the attributes
        if instruction.opname.startswith("FORMAT_"):
            names |= _TEXTS
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


def _has_constant_name(following: list[dis.Instruction]) -> bool:
    """Whether what follows ``getattr`` is a call with an object, a string and perhaps a default,
    none of them computed."""
    arguments: list[object] = []
    for instruction in following:
        if instruction.opname in ("PRECALL", "CALL"):
            return len(arguments) in (2, 3) and isinstance(arguments[1], str)
        if instruction.opname == "LOAD_CONST":
            arguments.append(instruction.argval)
        elif instruction.opname in ("LOAD_FAST", "LOAD_DEREF", *_GLOBAL):
            arguments.append(None)
        elif instruction.opname not in _ATTRIBUTE or len(arguments) == 2:
            return False  # something is computed
    return False


def _strings(constants: tuple[object, ...]) -> set[str]:
    found: set[str] = set()
    for constant in constants:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, (tuple, frozenset)):
            found |= _strings(tuple(constant))
    return found
