"""Programs for others: a module as StableHLO with its weights apart, in files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from lazyxla import _C, runtime
from lazyxla.jax.arrays import to_jax
from lazyxla.jax.export_dimensions import Dimensions, check_sizes
from lazyxla.jax.flat_functions import constant_key
from lazyxla.jax.modules import JaxModule
from lazyxla.jax.torch_functions import with_composites
from lazyxla.jax.views import JaxView
from lazyxla.lowering.jax_call import lowered_for
from lazyxla.runtime import BACKEND

_FORMAT = 1
_PROGRAM, _ARTIFACT, _TEXT = "program.jax_export", "program.stablehlo", "program.mlir"
_WEIGHTS, _MANIFEST = "weights.safetensors", "manifest.json"


class Exported(NamedTuple):
    """What :func:`export` returns.

    Attributes:
        program: a ``jax.export.Exported``: of parameters and buffers (dicts by name), a tuple of
            arguments and a dict of keyword arguments, to a pair of the results and a dict of the
            buffers that it changes.
        weights: parameters and buffers by name, CPU tensors.
        manifest: a dict of what can be said in JSON; see :func:`export`.
    """

    program: Any
    weights: dict[str, torch.Tensor]
    manifest: dict[str, Any]

    def text(self) -> str:
        """The program as MLIR."""
        return str(self.program.mlir_module())

    def save(self, path: str | Path) -> None:
        """Writes a folder of files: the program as ``jax.export`` reads it, as a portable artifact
        of StableHLO and as text, the weights as safetensors, and the manifest.

        Args:
            path: of the folder, which is made if there is none.
        """
        from safetensors.torch import save_file

        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _PROGRAM).write_bytes(self.program.serialize())
        (folder / _ARTIFACT).write_bytes(self.program.mlir_module_serialized)
        (folder / _TEXT).write_text(self.text())
        save_file({name: x.contiguous() for name, x in self.weights.items()}, folder / _WEIGHTS)
        (folder / _MANIFEST).write_text(json.dumps(self.manifest, indent=1))


def export(
    module: nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
) -> Exported:
    """Makes a program of a module that runs without PyTorch: in JAX, or by any PJRT plugin.

    It computes what the module's forward does in its present state (``eval()`` counts), in
    PyTorch's dtypes, for arguments of these shapes. Arguments that are no tensors are constants of
    the program, which takes None for them. Attention, norms, GELU, SiLU and softmax are composites
    with PyTorch's names ("aten.gelu"), by which a compiler may find them. JAX must have 64-bit
    types where those have (``jax.enable_x64(True)``).

    The manifest lists, in the order of the program's flat arguments and results, their kinds
    ("parameter", "buffer", "argument"; "result", "buffer"), names, shapes and dtypes; "constants"
    by name; "mutations", the names of the buffers that are returned changed; "dimensions", the
    bounds of symbolic ones, which shapes name; and "platforms", whose position is the program's
    first argument if there are several (see ``jax.export``).

    With symbolic dimensions the program is lowered for some sizes of them, and made one for all;
    what rules choose by sizes is as it is for the small ones. It has no composites.

    Args:
        module: a module, on any device; or what ``torch.export.export`` returns.
        args, kwargs: examples of its arguments: pytrees of tensors and of constants.
        dynamic_shapes: which dimensions of the arguments are symbolic, as ``torch.export.export``
            takes it, which checks that the module allows it. What it returned has them already.
        platforms: where it is to run.

    Raises:
        ValueError: it draws random numbers, or writes to an argument.
        lazyxla.lowering.LoweringError: it has an operator that only the host can run, or is another
            program for other sizes of symbolic dimensions.
        torch._dynamo.exc.UserError: the module does not allow the `dynamic_shapes`.
    """
    import jax

    dimensions = None
    if dynamic_shapes is not None:
        if isinstance(module, torch.export.ExportedProgram):
            raise TypeError("an exported program has its dynamic shapes already")
        allowed = torch.export.export(
            module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes
        )
        dimensions = Dimensions(allowed, dynamic_shapes)
    if isinstance(module, torch.export.ExportedProgram):
        if not args and not kwargs and module.example_inputs is not None:
            args, kwargs = module.example_inputs
        dimensions = Dimensions(module, None)
        module = module.module()
        _move_graphs(module)
    view = JaxView(module)
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    mutated: list[str] = []
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs or {})))
    arrays, constants = _parted(leaves)

    def compute(parameters: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
        found = iter(jax.tree.leaves((args, kwargs)))
        filled = [next(found) if x is not None else c for x, c in zip(arrays, constants)]
        args, kwargs = jax.tree.unflatten(tree, filled)
        (results, after), plan = view.run((parameters, *args), kwargs, buffers)
        mutated[:] = sorted(plan.written)
        return results, {name: after[name] for name in mutated}

    with jax.enable_x64(True), with_composites():
        parameters, buffers = view.parameters, view.buffers
        types = to_jax(arrays)
        if dimensions is not None and dimensions.bounds:
            types = dimensions.types(tree, types)
        given = (parameters, buffers, *jax.tree.unflatten(tree, types))
        jitted = jax.jit(compute, keep_unused=True)
        program = jax.export.export(jitted, platforms=tuple(platforms))(*given)
    inputs = _listed(given, ("parameter", "buffer", "argument", "argument"))
    outputs = _listed(jax.tree.unflatten(program.out_tree, program.out_avals), ("result", "buffer"))
    manifest = {
        "format": _FORMAT,
        "platforms": list(program.platforms),
        "inputs": inputs,
        "outputs": outputs,
        "mutations": mutated,
        "dimensions": {} if dimensions is None else dimensions.bounds,
        "constants": {
            _name(path): _kept(value)
            for (path, _), value in zip(_with_paths(tree), constants, strict=True)
            if value is not None
        },
        "torch": torch.__version__,
        "calling_convention": program.calling_convention_version,
    }
    kept = {name: x.detach().cpu().clone() for name, x in weights.items()}
    return Exported(program, kept, manifest)


def load_exported(path: str | Path, device: torch.device | str = BACKEND) -> nn.Module:
    """A module that runs what :meth:`Exported.save` wrote, on the device.

    A call is one node of the graph, for inference. What it changes of its buffers is written. A
    program with symbolic dimensions is compiled for each combination of sizes that it meets; a call
    raises a ValueError for sizes that it does not allow.

    Args:
        path: the folder.
        device: where its weights are.

    Raises:
        ValueError: the files are of a later format, or damaged.
    """
    import jax
    from safetensors.torch import load_file

    folder = Path(path)
    manifest = json.loads((folder / _MANIFEST).read_text())
    if manifest["format"] > _FORMAT:
        raise ValueError(f"{folder} has format {manifest['format']}; this lazyxla knows {_FORMAT}")
    serialized = bytearray((folder / _PROGRAM).read_bytes())
    try:
        program = jax.export.deserialize(serialized)
    except Exception as error:
        reason = f"{folder / _PROGRAM} is no program that this JAX reads: {error}"
        raise ValueError(reason) from error
    weights = load_file(folder / _WEIGHTS)
    # An argument may have the name of a parameter.
    names = {(each["kind"], each["name"]) for each in manifest["inputs"]}

    def apply(parameters: Any, buffers: Any, training: bool, args: Any, kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        for (path, _), leaf in zip(_with_paths(tree), leaves, strict=True):
            constant = manifest["constants"].get(_name(path))
            is_array = isinstance(leaf, jax.Array)
            if not is_array and constant_key(_kept(leaf)) != constant_key(constant):
                raise ValueError(f"the program was made for {_name(path)}={constant}, got {leaf!r}")
        given = [leaf if isinstance(leaf, jax.Array) else None for leaf in leaves]
        check_sizes(manifest, [x.shape for x in given if x is not None])
        called = _named_as_lowered(program)
        return called.call(parameters, buffers, *jax.tree.unflatten(tree, given))

    def of_kind(kind: str) -> dict[str, torch.Tensor]:
        return {name: x for name, x in weights.items() if (kind, name) in names}

    module = JaxModule(apply, of_kind("parameter"), of_kind("buffer"), device, wide=True)
    return module.requires_grad_(False).eval()


def _named_as_lowered(program: Any) -> Any:
    """A program whose platforms have the names by which JAX lowers for ours (`lowered_for`)."""
    where = _C.captured_platform() or runtime.platform()
    names = tuple(lowered_for(p) if p == where else p for p in program.platforms)
    return dataclasses.replace(program, platforms=names)


def _move_graphs(module: nn.Module) -> None:
    """Replaces the device in an exported program's graphs by ours."""

    def moved(x: Any) -> Any:
        return torch.device(BACKEND) if isinstance(x, torch.device) else x

    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in list(part.graph.nodes):
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                part.graph.erase_node(node)
            else:
                node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))
        part.recompile()


def _parted(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """Tensors, and all else; None where it is of the other kind."""
    are_tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    tensors = [x if yes else None for x, yes in zip(leaves, are_tensors, strict=True)]
    return tensors, [None if yes else x for x, yes in zip(leaves, are_tensors, strict=True)]


def _with_paths(tree: Any) -> list[tuple[Any, Any]]:
    """The leaves of the arguments and keyword arguments, of which the kind does not matter."""
    import jax

    args, kwargs = jax.tree.unflatten(tree, [0] * tree.num_leaves)
    return [
        *jax.tree_util.tree_leaves_with_path(args),
        *jax.tree_util.tree_leaves_with_path(kwargs),
    ]


def _kept(constant: Any) -> Any:
    """A constant as the manifest has it."""
    if isinstance(constant, (bool, int, float, str)):
        return json.loads(json.dumps(constant))  # of a class of Python's own
    return repr(constant)


def _name(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)


def _listed(tree: Any, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The arrays of a tuple of trees, one of each kind."""
    import jax

    found = []
    for kind, part in zip(kinds, tree, strict=True):
        for path, x in jax.tree_util.tree_leaves_with_path(part):
            shape = [d if isinstance(d, int) else str(d) for d in x.shape]
            dtype = str(x.dtype)
            found.append({"kind": kind, "name": _name(path), "shape": shape, "dtype": dtype})
    return found
