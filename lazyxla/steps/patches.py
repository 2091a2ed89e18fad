"""Code of other people's in PyTorch's modules and classes.

PyTorch's own code may call it unseen, if it names it. A name that only its owner uses, such as a
method that transformers adds to nn.Module, is read by code that names it, as any other is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from lazyxla.steps.code import names_of

# Whose code PyTorch's modules and classes have from the start, besides PyTorch's own.
_AT_HOME = {*sys.stdlib_module_names, "torch", "torchgen", "typing_extensions", "tqdm", "lazyxla"}
# What may call a function: by these attributes, or from its closure.
_WRAPPERS = (
    *(FunctionType, MethodType, staticmethod, classmethod, property, functools.partial),
    *(functools.partialmethod, functools.cached_property, type(functools.cache(len))),
)
_WRAPPED = ("__func__", "fget", "fset", "fdel", "func", "__wrapped__")


def is_patch(value: Any) -> bool:
    """Whether a value in a namespace of PyTorch's runs somebody else's code: it was put there, or
    it is a wrapper of PyTorch's around it, as ``torch.no_grad()`` makes one."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            if not _is_at_home(each):
                return True
            waiting += _wrapped_by(each)
    return False


def _is_at_home(value: Any) -> bool:
    if isinstance(value, FunctionType):
        module = value.__globals__.get("__name__", "")
    else:
        module = value.__module__ if isinstance(value, type) else type(value).__module__
    root = str(module).partition(".")[0]
    return root in _AT_HOME or root.startswith("namedtuple_")


def _wrapped_by(value: Any) -> list[Any]:
    if not isinstance(value, _WRAPPERS):
        return []
    inner = [getattr(value, name, None) for name in _WRAPPED]
    inner += map(_content, getattr(value, "__closure__", None) or ())
    return [each for each in inner if isinstance(each, _WRAPPERS)]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def patches_of(space: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """What others have put into a namespace of PyTorch's, and the keys that PyTorch's code, or
    Python itself, names."""
    patches = {key: value for key, value in space.items() if is_patch(value)}
    if not patches:
        return {}, set()
    named = _names_in_torch(len(sys.modules))
    return patches, {key for key in patches if key in named or key.startswith("__")}


@functools.lru_cache(maxsize=1)
def _names_in_torch(modules: int) -> set[str]:
    """What the functions and methods of PyTorch's modules name, of the `modules` loaded now."""
    names: set[str] = set()
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.partition(".")[0] == "torch":
            for value in list(vars(module).values()):
                is_class = issubclass(type(value), type)
                for each in list(vars(value).values()) if is_class else [value]:
                    _add_names(each, names)
    return names


def _add_names(value: Any, names: set[str]) -> None:
    """Names and strings in the code of a function, or of a method of any kind."""
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    if type(value) is property:
        for each in (value.fget, value.fset, value.fdel):
            _add_names(each, names)
    elif type(value) is FunctionType:
        if not is_patch(value):
            _add_names(value.__code__, names)
        _add_names(getattr(value, "__wrapped__", None), names)
    elif type(value) is CodeType:
        names |= names_of(value)
        for constant in value.co_consts:
            _add_names(constant, names)
