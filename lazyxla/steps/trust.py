"""Which code a step may call without anybody looking into it.

PyTorch's own functions do what their arguments, their objects' attributes and PyTorch's state say;
all three are guarded. Python's functions for arithmetic and containers do what their arguments say.
All other Python code is read (code.py), and all other code in C is not trusted: a step that calls
it is not captured.
"""

from __future__ import annotations

import builtins
from types import CellType, ModuleType
from typing import Any

import torch


class Unfit(Exception):
    """Why a step cannot be captured: the end of a sentence about it."""


_TRUSTED = {
    *("torch", "math", "cmath", "operator", "_operator", "functools", "_functools", "itertools"),
    *("collections", "_collections", "_collections_abc", "contextlib", "typing", "abc", "enum"),
    *("types", "numbers", "builtins", "typing_extensions"),
}
# Parts of this package whose functions record what their arguments say, and no more.
_OWN = {
    *("lazyxla.mesh", "lazyxla.spmd", "lazyxla.parallel", "lazyxla.torch_plans"),
    "lazyxla.optimizer_steps",
}
# Parts of PyTorch that act on what is not guarded: files, processes, seeds, other compilers.
_UNTRUSTED = (
    *("torch.distributed", "torch.utils.data", "torch.jit", "torch._dynamo", "torch.compiler"),
    *("torch.hub", "torch.multiprocessing", "torch.random", "torch.backends", "torch.cuda"),
    *("torch.accelerator", "torch.lazyxla", "torch.nn.parallel", "torch.package", "torch.onnx"),
    *("torch._inductor", "torch.serialization", "torch.storage", "torch.numa", "torch.monitor"),
)
_REFUSED_FUNCTIONS = {
    id(function)
    for function in (
        *(torch.manual_seed, torch.seed, torch.initial_seed, torch.get_rng_state),
        *(torch.set_rng_state, torch.save, torch.load, torch.compile, torch.set_num_threads),
        *(torch.get_num_threads, torch.from_numpy, torch.from_file, torch.frombuffer),
        *(torch.set_default_device, torch.set_default_dtype, torch.random.fork_rng),
    )
}
REFUSED_NAMES = frozenset(
    (
        # A tensor's memory, how often it was written, what it is a view of.
        *("data_ptr", "_version", "untyped_storage", "_typed_storage", "numpy", "__array__"),
        *("__dlpack__", "_base", "_is_view"),
        # Variables of functions and frames, whatever their names; all classes that there are.
        *("__globals__", "__builtins__", "f_globals", "f_locals", "f_builtins", "f_back"),
        *("__annotations__", "__annotate__", "__annotate_func__", "get_type_hints"),
        "__subclasses__",
    )
)
"""Names of attributes and functions that expose what no guard compares."""
CALLED_BY_NAME = ("__replace__", "__annotate_func__")
"""Methods of Python's own that only code calls which names them: what copy.replace() runs, of
dataclasses from Python 3.13 on, and what makes annotations, from 3.14 on."""
DYNAMIC = frozenset({"getattr", "setattr", "delattr", "hasattr", "vars"})
"""Builtin functions by which code reads attributes whose names it makes up."""
DYNAMIC_NAMES = frozenset(
    (
        *("__dict__", "__getattribute__", "__setattr__", "__delattr__", "attrgetter"),
        *("methodcaller", "__reduce_ex__", "__reduce__"),
    )
)
"""Names of attributes and functions with which it does, too."""
BUILTINS = DYNAMIC | {
    *("abs", "all", "any", "bool", "bytes", "callable", "chr", "classmethod", "complex", "dict"),
    *("divmod", "enumerate", "filter", "float", "format", "frozenset", "int", "isinstance"),
    *("issubclass", "iter", "len", "list", "map", "max", "min", "next", "object", "ord", "pow"),
    *("property", "range", "repr", "reversed", "round", "set", "slice", "sorted", "staticmethod"),
    *("str", "sum", "super", "tuple", "type", "zip", "__debug__", "NotImplemented", "Ellipsis"),
}
# repr, str and format show no address: only an object that Python code makes could, by id() and
# object.__repr__, and no operator takes a string.


def is_trusted(module: str) -> bool:
    """Whether code of a module of this name is called unseen."""
    return (module.partition(".")[0] in _TRUSTED or module in _OWN) and not is_refused(module)


def is_refused(module: str) -> bool:
    """Whether it is a part of PyTorch that a step must not use."""
    return any(module == name or module.startswith(name + ".") for name in _UNTRUSTED)


def has_refused_code(module: str) -> bool:
    """Whether a step must not call a module's functions, nor use its classes."""
    is_ours = module.partition(".")[0] == "lazyxla"
    return is_refused(module) or (is_ours and module not in _OWN)


def has_code_unseen(kind: type) -> bool:
    """Whether a class has trusted methods, whose code is not inspected for the attributes it
    reads."""
    if kind is torch.nn.Module or kind.__module__ in ("abc", "typing", "typing_extensions"):
        return False
    return kind is not object and is_trusted(kind.__module__)


_own_kernels = frozenset(torch.library._impls)
_KEYS = (
    *("PrivateUse1", "AutogradPrivateUse1", "AutocastPrivateUse1", "Autograd", "BackendSelect"),
    *("CompositeImplicitAutograd", "CompositeExplicitAutograd", "ADInplaceOrView"),
)


def install() -> None:
    """Notes which kernels in Python are the package's own: those that are registered by now."""
    global _own_kernels
    _own_kernels = frozenset(torch.library._impls)


def check_kernels() -> None:
    """Raises Unfit if somebody else's Python code has taken an operator of PyTorch's over."""
    for name in torch.library._impls - _own_kernels:
        if name.startswith("aten/") and name.endswith(_KEYS):
            operator = name.split("/")[1]
            raise Unfit(f"aten::{operator} runs code that was registered for it")


def check_object(thing: Any, name: str) -> None:
    """Raises Unfit for functions that no step may call."""
    if id(thing) in _REFUSED_FUNCTIONS:
        raise Unfit(f"it calls {name}()")


def check_builtin(name: str) -> None:
    """Raises Unfit for what is built in and does more than compute."""
    value = getattr(builtins, name)
    if isinstance(value, type) and issubclass(value, BaseException):
        return
    if name not in BUILTINS:
        raise Unfit(f"it calls {name}(), which does more than compute")


def module_of(function: Any) -> str:
    """The module of a function in C; of a method, its class's."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, ModuleType):
        return owner.__name__
    owner = getattr(function, "__objclass__", owner)
    if isinstance(owner, type):
        return owner.__module__
    return getattr(function, "__module__", None) or ""


def content_of(cell: CellType, variable: str) -> Any:
    """What a variable of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:
        raise Unfit(f"its variable {variable} has no value yet") from None
