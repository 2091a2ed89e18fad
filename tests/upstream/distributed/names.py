"""Puts another device's name into PyTorch's tests for CUDA, while they are imported.

The tests say "cuda", `torch.cuda`, `x.cuda()` and "nccl" in their text, and so do the base classes
that the installed PyTorch has for them. What is imported is the text with other names; no file is
changed. For the device "lazyxla", `torch.cuda.set_device(rank)` becomes
`torch.lazyxla.set_device(rank)`. Where each process has one device, that is its number 0, not that
of the process's rank; and the number of devices, which the tests compare with that of processes, is
what all processes have.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_BASE_CLASSES = (
    "torch.testing._internal.common_dist_composable",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed",
)

_BACKENDS = {"lazyxla": "lazyxla", "cpu": "gloo"}

HAS_DEVICE = "TEST_DEVICE"
"""What takes the place of `TEST_CUDA`; it has to be put into the modules that define that."""

_DEVICE_OF_RANK = re.compile(
    r"""((?:\bcuda|device(?:_type)?\}|accelerator\.type\}):|\.cuda\(|\bdevice=|\bdevice_ids=\[)"""
    r"""\{?(?:(?:self|cls)\.)?(?:rank|dev_id|dist\.get_rank\(\))\}?(?=["'\]),])"""
)

_OWN_NUMBER = re.compile(r"\bself\.rank % DEVICE_COUNT\b")
_DEVICE_COUNT = re.compile(
    r"\btorch\.(?:cuda|accelerator|get_device_module\([\w.]+\))\.device_count\(\)"
)

DEVICES = 4
"""What all processes have: as many as there are of most tests."""


def rename(text: str, device: str, own_device: bool = False) -> str:
    """The text of a module, for a device; `own_device`: of which each process has one."""
    if own_device:
        text = _DEVICE_OF_RANK.sub(r"\g<1>0", text)
        text = _OWN_NUMBER.sub("0", text)
        text = _DEVICE_COUNT.sub(str(DEVICES), text)
    backend = _BACKENDS[device]
    rules = [
        (r"\bTEST_CUDA\b", HAS_DEVICE),
        (r"\bis_nccl_available\b", "is_gloo_available"),
        # CUDA's own settings and libraries stay.
        (r"(?<!backends\.)(?<!version\.)\bcuda\b(?!\.(nccl|amp)\b)", device),
        (r"(?<!cuda\.)\bnccl\b", backend),
        # Processes of a test start in milliseconds when they need not import PyTorch again.
        (r'get_context\("spawn"\)', 'get_context("fork")'),
    ]
    if device == "cpu":  # which is no accelerator
        rules.append((r"torch\.accelerator\.current_accelerator\(\)", 'torch.device("cpu")'))
        rules.append((r"torch\.accelerator\b", "torch.cpu"))
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the text with the device's names."""

    device = ""
    own_device = False

    def get_code(self, fullname: str) -> CodeType:  # past the cache of compiled modules
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code

    def source_to_code(self, data: Any, path: Any, *_: Any, **__: Any) -> Any:
        text = rename(bytes(data).decode(), self.device, self.own_device)
        return compile(text, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Of the tests in a directory, and of their base classes."""

    def __init__(self, directory: Path, device: str, own_device: bool) -> None:
        self._directory = directory
        values = {"device": device, "own_device": own_device}
        self._loader = type("_LoaderOfDevice", (_Loader,), values)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        is_test = Path(spec.origin).is_relative_to(self._directory)
        if not is_test and not fullname.startswith(_BASE_CLASSES):
            return None
        spec.loader = self._loader(fullname, spec.origin)
        return spec


def install(directory: Path, device: str, own_device: bool) -> None:
    """From now on, tests of the directory and their base classes are imported for the device."""
    sys.meta_path.insert(0, _Finder(directory, device, own_device))
