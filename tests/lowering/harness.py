"""Runs one operator through the lowering on the plugin that users run, and compares it with
PyTorch's CPU kernels.

    check("aten::add.Tensor", x, y, alpha=2)

Tensors become inputs of a program; numbers become scalar slots, checked as constants first and,
where no rule has made them static, as runtime inputs too. `OnHost(tensor)` becomes a slot as well,
like a 0-dim CPU tensor that is mixed into device tensors.
"""

import functools
from typing import Any, NamedTuple

import torch

from lazyxla import _C
from lazyxla.lowering import (
    Node,
    Program,
    Ref,
    Slot,
    SlotSpec,
    Target,
    TensorSpec,
    lower,
    lower_to_text,
)

_NUMBER_DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


class OnHost(NamedTuple):
    """Marks a 0-dim tensor argument that stays on the CPU."""

    tensor: torch.Tensor


class Recorded(NamedTuple):
    program: Program
    inputs: list[torch.Tensor]
    expected: list[torch.Tensor]


def check(op: str, *args: Any, **kwargs: Any) -> None:
    """Lowers `op` on the arguments (torch call form), runs it and compares all outputs with
    PyTorch's.
    """
    recorded = record(op, *args, **kwargs)
    static = _compare(recorded)
    slots = [
        slot._replace(variable=number not in static and _can_vary(slot))
        for number, slot in enumerate(recorded.program.slots)
    ]
    if slots != recorded.program.slots:
        program = recorded.program._replace(slots=slots)
        _compare(recorded._replace(program=program))


def run(op: str, *args: Any, seed: int = 0, ordinal: int = 0, **kwargs: Any) -> list[torch.Tensor]:
    """The outputs as the lowering computes them, for random operators and for other comparisons."""
    recorded = record(op, *args, seed=seed, ordinal=ordinal, **kwargs)
    return execute(recorded.program, recorded.inputs)[0]


def text(op: str, *args: Any, **kwargs: Any) -> str:
    """The StableHLO text of the operator's program."""
    return lower_to_text(record(op, *args, **kwargs).program, "cpu")


def find_op(name: str) -> Any:
    """The overload that a schema name such as aten::add.Tensor stands for."""
    namespace, rest = name.split("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def record(op: str, *args: Any, seed: int = 0, ordinal: int = 0, **kwargs: Any) -> Recorded:
    """The one-node program of a call and PyTorch's own results for it."""
    overload = find_op(op)
    inputs: list[torch.Tensor] = []
    slots: list[SlotSpec] = []

    def slot(value: Any, dtype: torch.dtype, wrapped: bool, variable: bool = False) -> Slot:
        slots.append(SlotSpec(value, dtype, wrapped, variable))
        return Slot(len(slots) - 1)

    def bind(arg: Any, kind: str) -> Any:
        if isinstance(arg, OnHost):
            return slot(arg.tensor.item(), arg.tensor.dtype, False)
        if isinstance(arg, torch.Tensor):
            inputs.append(arg)
            return Ref(len(inputs) - 1)
        if isinstance(arg, (list, tuple)):
            return [bind(a, kind.removeprefix("List[")) for a in arg]
        if isinstance(arg, _number_types) and ("number" in kind or "float" in kind):
            value = float(arg) if "float" in kind else arg
            return slot(value, _NUMBER_DTYPES[type(value)], True)
        return arg

    values = _in_schema_order(overload, args, kwargs)
    kinds = [str(a.type) for a in overload._schema.arguments]
    bound = tuple(bind(v, k.replace("Optional[", "")) for v, k in zip(values, kinds, strict=True))
    expected = _flatten(overload(*_on_cpu(args), **_on_cpu(kwargs)))
    specs = tuple(TensorSpec(t.dtype, tuple(t.shape)) for t in expected)
    rng = None
    if torch.Tag.nondeterministic_seeded in overload.tags:
        rng = (
            slot(seed, torch.int64, True, variable=True),
            slot(ordinal, torch.int64, True, variable=True),
        )
    outputs = [Ref(len(inputs) + i) for i in range(len(specs))]
    program = Program(
        [TensorSpec(t.dtype, tuple(t.shape)) for t in inputs],
        [Node(op, bound, specs, rng)],
        outputs,
        slots,
        {},
    )
    return Recorded(program, inputs, expected)


_number_types = (bool, int, float, complex)


def _in_schema_order(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in schema order; a default stands in for what is not given."""
    values, kwargs = [], dict(kwargs)
    for number, argument in enumerate(overload._schema.arguments):
        if number < len(args):
            value = args[number]
        elif argument.name in kwargs:
            value = kwargs.pop(argument.name)
        else:
            value = argument.default_value
        kind = str(argument.type)
        if kind.endswith("List[int]") and isinstance(value, int) and argument.N:
            value = [value] * argument.N
        values.append(value)
    if kwargs:
        raise TypeError(f"{overload} has no arguments {sorted(kwargs)}")
    return values


def _on_cpu(tree: Any) -> Any:
    """The arguments for PyTorch's own call: clones, as some operators write to theirs."""
    if isinstance(tree, OnHost):
        return tree.tensor
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {k: _on_cpu(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_on_cpu(v) for v in tree)
    return tree


def _flatten(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result if part is not None for t in _flatten(part)]


def _can_vary(slot: SlotSpec) -> bool:
    return slot.dtype != torch.bool and not slot.dtype.is_complex


def _compare(recorded: Recorded) -> set[int]:
    results, static = execute(recorded.program, recorded.inputs)
    for got, wanted in zip(results, recorded.expected, strict=True):
        torch.testing.assert_close(got, wanted.contiguous(), equal_nan=True, check_stride=False)
    return static


# ---- running ----


@functools.cache
def _device() -> Any:
    """The first device of the plugin that users run, by jaxlib, whose client it shares."""
    from jaxlib import xla_client

    xla_client.load_pjrt_plugin_with_c_api("lazyxla_tests", _C.shared_api())
    return xla_client.make_c_api_client("lazyxla_tests", {}).local_devices()[0]


@functools.cache
def _options(platform: str) -> Any:
    """Those that users' programs are compiled with: without the debug options that jaxlib fills in,
    of which another version means others than the plugin does. Maxima keep nan, as other platforms
    have it."""
    from jaxlib import xla_client

    one_replica_and_partition = b"\x1a\x04\x20\x01\x28\x01"  # fields 4 and 5 of field 3
    options = xla_client.CompileOptions.ParseFromString(one_replica_and_partition)
    overrides = _C.compile_options()
    if platform != "cpu":
        overrides["xla_cpu_enable_fast_min_max"] = False
    options.env_option_overrides = list(overrides.items())
    return options


def execute(
    program: Program, inputs: list[torch.Tensor], target: Target | str = "cpu"
) -> tuple[list[torch.Tensor], set[int]]:
    """Lowers for a target, verifies, compiles and runs a program on the CPU.

    Returns its outputs and static slots.
    """
    if isinstance(target, str):
        target = Target(target)
    lowered = lower(program, target._replace(stablehlo_version="1.13.0"), verify=True)
    device = _device()
    import jax
    from jaxlib import _jax

    executable = device.client.compile_and_load(
        lowered.artifact, _jax.DeviceList((device,)), _options(target.platform)
    )
    operands = [to_numpy(t) for t in inputs]
    for dtype in (torch.float64, torch.int64):
        values = [
            s.value
            for number, s in enumerate(program.slots)
            if s.variable
            and number not in lowered.static_slots
            and s.dtype.is_floating_point == dtype.is_floating_point
        ]
        if values:
            operands.append(torch.tensor(values, dtype=dtype).numpy())
    with jax.enable_x64(True):
        buffers = [jax.device_put(x, device) for x in operands]
    results = executable.execute_sharded(buffers).disassemble_into_single_device_arrays()
    dtypes = _output_dtypes(program)
    tensors = [to_torch(r[0], d) for r, d in zip(results, dtypes, strict=True)]
    return tensors, set(lowered.static_slots)


def _output_dtypes(program: Program) -> list[torch.dtype]:
    specs = [*program.inputs, *(o for node in program.nodes for o in node.outputs)]
    return [specs[ref].dtype for ref in program.outputs]


def to_numpy(tensor: torch.Tensor) -> Any:
    import ml_dtypes
    import numpy as np

    tensor = tensor.detach().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if hasattr(ml_dtypes, name):
        whole = torch.int16 if tensor.dtype.itemsize == 2 else torch.uint8
        return tensor.view(whole).numpy().view(getattr(ml_dtypes, name))
    return np.ascontiguousarray(tensor.resolve_conj().resolve_neg().numpy())


def to_torch(array: Any, dtype: torch.dtype) -> torch.Tensor:
    import numpy as np

    data = np.array(array)
    if dtype == torch.bfloat16 or (dtype.itemsize == 1 and dtype.is_floating_point):
        whole = np.int16 if dtype.itemsize == 2 else np.uint8
        return torch.from_numpy(data.view(whole).copy()).view(dtype)
    return torch.from_numpy(data).clone()
