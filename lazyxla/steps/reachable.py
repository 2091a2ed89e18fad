"""All that a step's Python code can read, as guards.

The walk begins at the function: its closure, its defaults, the globals that its code names, and on
from there through containers, objects and the code that they bring along. Of an object of the
user's own class only those attributes count whose names occur in code that was found; of PyTorch's
modules and optimizers all do. What cannot be compared, such as an iterator or a file, makes the
step unfit, with a reason.
"""

from __future__ import annotations

import builtins
import collections
import functools
import sys
import types
import weakref
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree

from lazyxla import _C
from lazyxla.runtime import BACKEND
from lazyxla.steps import trust
from lazyxla.steps.code import FORMAT, MAKE_TEXT, TEXTS, reads_of
from lazyxla.steps.patches import patches_of
from lazyxla.steps.torch_globals import REGISTRIES, globals_of_torch
from lazyxla.steps.trust import Unfit

_VALUES = (
    *(int, float, complex, bool, str, bytes, type(None), type(...), type(NotImplemented), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(_C.Mesh, _C.Sharding),
)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_C_FUNCTIONS = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType),
)
# Modules whose wrappers do, within a step, what they wrap does: those of lazyxla.compile(), and
# those that keep a dataclass's __repr__ from calling itself.
_TRANSPARENT = ("lazyxla.modes", "dataclasses", "reprlib")
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_MOST_OBJECTS = 200_000
# Bytes of an instance that has nothing but a dict and weak references, and classes in C whose
# instances have nothing else that changes.
_PLAIN_SIZE = 32
_PLAIN_BASES = (object, int, float, tuple, frozenset, types.SimpleNamespace)
_MADE_BY_PYTHON = 1 << 9  # of a class's flags; C code may make such classes, too


class Reach:
    """The walk from a function and what it is called with.

    Attributes:
        guards: what must stay as it is for the function to do the same again.
        tensors: the tensors of the device that it reached.
        optimizers: the optimizers of torch.optim that it reached.
        schedules: whether it reached a scheduler of learning rates, which the step may call.
        names: all names and strings in the code that it reached.
        names_by_function: those of each function in Python, by its id.
        objects: all objects that it reached, by their ids.

    Raises:
        Unfit: something cannot be compared.
    """

    def __init__(self, function: Any, arguments: Any, varying: dict[int, dict[str, int]]) -> None:
        self.guards: Any = _C.StepGuards()
        self.tensors: list[torch.Tensor] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedules = False
        self.names: set[str] = set()
        self.names_by_function: dict[int, frozenset[str]] = {}
        self._varying = varying  # by a dict's id: keys whose numbers may vary
        self.objects: dict[int, Any] = {}
        self._work: list[tuple[Any, str]] = []
        self._looked_up: set[tuple[int, str]] = set()
        # Namespaces of which what is named counts: a dict, its name, keys visited, has it a guard.
        self._by_name: list[tuple[dict[str, Any], str, set[str], bool]] = []
        self._modules: set[str] = set()
        self._dynamic = False
        for value, name in globals_of_torch(self.guards):
            self._add(value, name)
        for module in ("torch", "torch.functional", "torch.nn.functional"):
            self._torch_module(module)
        for kind in (torch.Tensor, nn.Parameter, nn.Module, torch.optim.Optimizer):
            self._type(None, kind, kind.__qualname__)
            self._patches(vars(kind), kind.__qualname__)
        self._add(function, getattr(function, "__name__", "the step"))
        self._arguments(arguments)
        self._run()

    def _torch_module(self, name: str) -> None:
        """The attributes of a PyTorch module: its own code is trusted as it is now."""
        module = sys.modules.get(name)
        if name.partition(".")[0] == "torch" and module is not None and name not in self._modules:
            self._modules.add(name)
            self.guards.add_dict(name, vars(module))
            self._patches(vars(module), name)
            if registry := REGISTRIES.get(name):
                self._add(vars(module)[registry], f"{name}.{registry}")

    def _patches(self, space: Any, name: str) -> None:
        """What others have put into a namespace of PyTorch's, as far as it is named."""
        patches, named = patches_of(space)
        for key in named:
            self._add(patches[key], f"{name}.{key}")
        self._by_name.append((patches, name, named, False))

    def _arguments(self, value: Any) -> None:
        """The arguments that are not tensors. The signature compares their containers."""
        if type(value) in (tuple, list):
            for each in value:
                self._arguments(each)
        elif type(value) is dict:
            for key, each in value.items():
                self._add(key, "an argument's key")
                self._arguments(each)
        elif type(value) is not torch.Tensor:
            self._add(value, "an argument")

    def _add(self, value: Any, name: str) -> None:
        if type(value) not in _VALUES and id(value) not in self.objects:
            self.objects[id(value)] = value
            self._work.append((value, name))

    def _run(self) -> None:
        while self._work:
            while self._work:
                if len(self.objects) > _MOST_OBJECTS:
                    raise Unfit("its code can reach too many objects")
                self._visit(*self._work.pop())
            for space, name, visited, _ in self._by_name:
                for key in self._named(space) - visited:
                    visited.add(key)
                    self._add(space[key], f"{name}.{key}")
        for space, name, visited, guarded in self._by_name:
            if guarded:
                self.guards.add_dict(name, space, {}, set(space) - visited)

    def _named(self, space: dict[str, Any]) -> set[str]:
        # Where code makes names up, all but the interpreter's own.
        return {k for k in space if k in self.names or (self._dynamic and not k.startswith("__"))}

    def _visit(self, value: Any, name: str) -> None:
        kind = type(value)  # not its __class__, which may say anything
        if issubclass(kind, torch.Tensor):
            self._tensor(value, name)
        elif kind is types.FunctionType:
            self._function(value, name)
        elif kind is types.MethodType:
            self._add(value.__func__, name)
            self._add(value.__self__, f"{name}.__self__")
        elif kind in _C_FUNCTIONS:
            self._c_function(value, name)
        elif issubclass(kind, type):
            self._class(value, name)
        elif kind is types.ModuleType:
            self._module(value)
            visited = {"__getattr__"}.intersection(vars(value))
            self._by_name.append((vars(value), name, visited, True))
            if visited and not trust.is_trusted(value.__name__):
                self._add(vars(value)["__getattr__"], f"{name}.__getattr__")
        elif kind in _DICTS:
            self._dict(value, name)
        elif kind in (list, set):
            self.guards.add_list(name, value)
            for i, each in enumerate(value):
                self._add(each, f"{name}[{i}]")
        elif issubclass(kind, (tuple, frozenset)):
            for i, each in enumerate(value):
                self._add(each, f"{name}[{i}]")
            if kind.__dictoffset__ == 0 and hasattr(kind, "_fields"):
                self._class(kind, kind.__qualname__)
            elif kind not in (tuple, frozenset):
                self._object(value, name)
        elif kind is functools.partial:
            self._type(value, kind, name)  # and that its dict is the same
            for part in (value.func, value.args, value.keywords, vars(value)):
                self._add(part, name)
        elif kind is weakref.ref:
            self.guards.add_call(f"what {name} refers to", value)
            self._add(value(), name)
        elif kind in (staticmethod, classmethod):
            self._add(value.__func__, name)
        elif kind is property:
            for part in (value.fget, value.fset, value.fdel):
                self._add(part, name)
        else:
            self._object(value, name)

    def _tensor(self, tensor: torch.Tensor, name: str) -> None:
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise Unfit(f"{name} is a {type(tensor).__name__}")
        if why := _C.unfit_tensor(tensor):
            raise Unfit(f"{name} {why}")
        self.guards.add_tensor(name, tensor)
        if tensor.__dict__:
            self._add(tensor.__dict__, f"the attributes of {name}")
        if tensor.device.type == BACKEND:
            self.tensors.append(tensor)

    def _dict(self, value: dict[Any, Any], name: str) -> None:
        self.guards.add_dict(name, value, self._varying.get(id(value), {}))
        if isinstance(value, collections.defaultdict):
            factory = f"the default_factory of {name}"
            self.guards.add_call(factory, functools.partial(getattr, value, "default_factory"))
            self._add(value.default_factory, factory)
        for key, each in value.items():
            self._add(key, f"a key of {name}")
            self._add(each, f"{name}[{key!r}]" if type(key) in (str, int) else f"{name}[...]")

    def _function(self, function: types.FunctionType, name: str) -> None:
        trust.check_object(function, name)
        module = function.__globals__.get("__name__", "")
        if module in _TRANSPARENT and hasattr(function, "__wrapped__"):
            self.guards.add_function(name, function)
            self._add(function.__wrapped__, name)
            return
        if trust.has_refused_code(module):
            raise Unfit(f"it calls {function.__qualname__} of {module}")
        self.guards.add_function(name, function)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        if trust.is_trusted(module):
            self._torch_module(module)
            # A wrapper of PyTorch's; what it wraps may be the user's.
            for variable, cell in cells:
                inner = trust.content_of(cell, variable)
                if not isinstance(inner, weakref.ref):
                    self.guards.add_cell(f"{variable} of {name}", cell)
                    self._add(inner, variable)
            return
        for default in function.__defaults__ or ():
            self._add(default, f"a default of {name}")
        if function.__kwdefaults__:
            self._add(function.__kwdefaults__, f"the defaults of {name}")
        if function.__dict__:
            self._add(function.__dict__, f"the attributes of {name}")
        for variable, cell in cells:
            inner = trust.content_of(cell, variable)
            self.guards.add_cell(variable, cell)
            self._add(inner, variable)
        self._code(function)

    def _code(self, function: types.FunctionType) -> None:
        if function.__builtins__ is not vars(builtins):  # type: ignore[attr-defined]
            raise Unfit(f"{function.__qualname__} has builtins of its own")
        reads = reads_of(function.__code__)
        if refused := reads.names & trust.REFUSED_NAMES:
            raise Unfit(f"{function.__qualname__} reads {sorted(refused)[0]} of something")
        for module in reads.imports:
            self._key(sys.modules, module, f"sys.modules[{module!r}]")
            self._torch_module(module)
            self._add(sys.modules.get(module), module)
        self.names |= reads.names
        self.names_by_function[id(function)] = frozenset(reads.names)
        self._dynamic |= reads.dynamic or not reads.names.isdisjoint(trust.DYNAMIC_NAMES)
        for chain in reads.chains:
            self._look_up(function.__globals__, chain)

    def _look_up(self, space: dict[str, Any], chain: tuple[str, ...]) -> None:
        """A global name, and attributes of it as long as it is a module."""
        first, *attributes = chain
        self._key(space, first, first)
        if first not in space:
            if hasattr(builtins, first):
                trust.check_builtin(first)
                self._key(vars(builtins), first, first)
            return
        value, name = space[first], first
        for attribute in attributes:
            if type(value) is not types.ModuleType:
                break
            self._module(value)
            inside = vars(value)
            name = f"{name}.{attribute}"
            if attribute not in inside:
                raise Unfit(f"it uses {name}, which {value.__name__} makes when it is asked for")
            self._key(inside, attribute, name)
            value = inside[attribute]
        self._add(value, name)

    def _module(self, module: types.ModuleType) -> None:
        """That a step may use a module, and what kind of object it is."""
        if trust.is_refused(module.__name__):
            raise Unfit(f"it uses {module.__name__}")
        if (id(module), "") not in self._looked_up:
            self._looked_up.add((id(module), ""))
            self._type(module, types.ModuleType, module.__name__)

    def _key(self, space: dict[str, Any], key: str, name: str) -> None:
        if (id(space), key) not in self._looked_up:
            self._looked_up.add((id(space), key))
            self.guards.add_key(name, space, key)

    def _c_function(self, function: Any, name: str) -> None:
        trust.check_object(function, name)
        self._reads_by_name(function.__name__)
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            self._add(owner, f"{name}.__self__")  # a method of an object that is compared
            return
        if owner is builtins:
            trust.check_builtin(function.__name__)
        module = trust.module_of(function)
        if not trust.is_trusted(module):
            raise Unfit(f"it calls {name}, of {module or 'an unknown module'}, which is not Python")

    def _reads_by_name(self, name: str) -> None:
        """Notes what a function in C reads that goes by another name in the code that calls it."""
        if name in trust.REFUSED_NAMES:
            raise Unfit(f"it reads {name} of something")
        self._dynamic |= name in trust.DYNAMIC or name in trust.DYNAMIC_NAMES or name in FORMAT
        if name in MAKE_TEXT:
            self.names.update(TEXTS)

    def _type(self, value: Any, kind: type, name: str) -> None:
        if not self.guards.add_type(name, value, kind):
            raise Unfit(f"Python cannot tell whether {kind.__qualname__} changes")

    def _class(self, kind: type, name: str) -> None:
        if trust.has_refused_code(kind.__module__):
            raise Unfit(f"it uses {kind.__qualname__} of {kind.__module__}")
        self.objects[id(kind)] = kind
        self._reads_by_name(kind.__name__)
        self._type(None, kind, name)
        if not trust.is_trusted(type(kind).__module__):
            raise Unfit(f"{kind.__qualname__} is of a class of classes, {type(kind).__qualname__}")
        self._as_tree_node(kind)
        inherited = {  # from code that is not inspected
            key
            for each in kind.__mro__
            if each is not object and trust.is_trusted(each.__module__)
            for key in vars(each)
        }
        for each in kind.__mro__:
            if trust.is_trusted(each.__module__) or (each is not kind and id(each) in self.objects):
                self._torch_module(each.__module__)
                self._patches(vars(each), each.__qualname__)
                continue
            if not each.__flags__ & _MADE_BY_PYTHON:
                raise Unfit(
                    f"it uses {each.__qualname__} of {each.__module__}, which is not Python"
                )
            self.objects[id(each)] = each
            visited = {"__dict__", "__weakref__", "__abstractmethods__", "_abc_impl", "__doc__"}
            for key, value in vars(each).items():
                # Methods that are used without being named: Python's own, and those that a trusted
                # class may call; and what else replaces an attribute of one.
                is_method = isinstance(value, _METHODS)
                if key.startswith("__"):
                    by_name = key in trust.CALLED_BY_NAME or (key in TEXTS and not inherited)
                    used = not by_name and (is_method or callable(value))
                else:
                    used = (is_method and bool(inherited)) or key in inherited
                if used and key not in visited:
                    visited.add(key)
                    self._add(value, f"{each.__qualname__}.{key}")
            space = cast(dict[str, Any], vars(each))
            # Its version is the type's guard.
            self._by_name.append((space, each.__qualname__, visited, False))

    def _as_tree_node(self, kind: type) -> None:
        """How PyTorch's functions for trees take objects of a class apart."""
        nodes = cast(dict[Any, Any], _pytree.SUPPORTED_NODES)
        self.guards.add_key("torch.utils._pytree.SUPPORTED_NODES", nodes, kind)
        self._add(nodes.get(kind), f"the tree node of {kind.__qualname__}")

    def _object(self, value: Any, name: str) -> None:
        kind = type(value)
        if kind.__dictoffset__ == 0 or kind.__basicsize__ > _PLAIN_SIZE:
            raise Unfit(f"{name} is a {kind.__qualname__}, which cannot be compared")
        if any(not c.__flags__ & _MADE_BY_PYTHON and c not in _PLAIN_BASES for c in kind.__mro__):
            raise Unfit(f"{name} is a {kind.__qualname__}, of a class that is not Python")
        self._type(value, kind, name)
        if id(kind) not in self.objects:
            self._class(kind, kind.__qualname__)
        space = object.__getattribute__(value, "__dict__")
        if issubclass(kind, torch.optim.Optimizer):
            self.optimizers.append(value)
        if issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
            self.schedules = True
        if any(trust.has_code_unseen(c) for c in kind.__mro__):
            self._dict(space, name)
            return
        visited: set[str] = set()
        if issubclass(kind, nn.Module):
            attributes = {"training"}.union(*map(vars, kind.__mro__))
            visited = {k for k in space if k.startswith("_") or k in attributes}
            for key in visited:
                self._add(space[key], f"{name}.{key}")
        self._by_name.append((space, name, visited, True))
