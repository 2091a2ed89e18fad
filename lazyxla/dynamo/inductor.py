"""What Inductor, the default backend of ``torch.compile``, finds for this device: an error message.

Inductor looks for a device's code generators in its module (``torch.lazyxla``) when it compiles for
the first time; this module is imported only then.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch._inductor.codegen.common import DeviceOpOverrides, register_device_op_overrides
from torch._inductor.codegen.wrapper import PythonWrapperCodegen as _PythonWrapperCodegen

from lazyxla.runtime import BACKEND


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "lazyxla: Inductor, torch.compile's default backend, generates no code for this device: "
        f'use torch.compile(..., backend="{BACKEND}"). Where a library calls torch.compile, '
        'torch.compiler.set_stance("force_eager") makes it run what it is given'
    )


class WrapperCodegen(_PythonWrapperCodegen):
    """The class that would write the code around kernels. Inductor asks it for its abilities also
    when it compiles for other devices."""

    create = staticmethod(_refuse)


class Scheduling:
    """A class, too: Inductor asks whether it derives from Triton's when it lowers a reduction."""

    __init__ = _refuse


PythonWrapperCodegen = CppWrapperCodegen = WrapperFxCodegen = WrapperCodegen

# Inductor looks these up first, and would otherwise fail with a missing key.
register_device_op_overrides(BACKEND, DeviceOpOverrides())
