"""Trying meshes, and what models offer to choose from, and ranking what fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lazyxla.aot import report
from lazyxla.aot.compiled import CompiledProgram
from lazyxla.aot.compiling import MeshLike, compile
from lazyxla.aot.topologies import Options, Topology
from lazyxla.mesh import Mesh
from lazyxla.spmd import SpecOf


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to spread a program over a topology."""

    mesh: str
    """Its axes, ``"data=8, model=2"``."""
    policy: Any
    """What the model was made with; None if there was nothing to choose."""
    program: CompiledProgram | None
    """None if the compiler refuses it since memory is too small."""
    reason: str
    """Why it does not fit; empty if it does."""


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Plans by estimated time, then those that do not fit. ``print`` shows a table."""

    plans: tuple[Plan, ...]

    @property
    def best(self) -> CompiledProgram | None:
        """The fastest that fits; None if nothing does."""
        return next((plan.program for plan in self.plans if not plan.reason), None)

    def __str__(self) -> str:
        with_policies = any(plan.policy is not None for plan in self.plans)
        titles = ("", "mesh", "policy", "estimated", "compute", "network", "peak", "of peak")
        rows: list[tuple[str, ...]] = [titles]
        rows += [(f"{i}.", *_cells(plan)) for i, plan in enumerate(self.plans, 1)]
        if not with_policies:
            rows = [(*row[:2], *row[3:]) for row in rows]
        lines = report.aligned(rows).split("\n")
        for i, plan in enumerate(self.plans, 1):
            if plan.reason:
                lines.append(f"{i}. does not fit: {plan.reason}")
        return "\n".join(lines)


def search(
    model: nn.Module | Callable[[Any], nn.Module],
    example_inputs: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    topology: str | Topology,
    meshes: Sequence[MeshLike],
    policies: Sequence[Any] = (),
    shardings: Callable[[nn.Module, Mesh], Any] | None = None,
    input_spec: SpecOf = (),
    train_step: Callable[[nn.Module], Callable[..., Any]] | None = None,
    options: Options | None = None,
) -> Ranking:
    """Compiles a program for several meshes, one after the other, and ranks them.

    ::

        print(lazyxla.aot.search(
            lambda remat: Model(config, remat=remat), (x, y), topology="v5e:4x4",
            meshes=[((16,), ("data",)), ((8, 2), ("data", "model"))], policies=[False, True],
            shardings=shardings, input_spec=("data",), train_step=training))

    Args:
        model: the module; with `policies` a function of one of them that makes it, best on "meta"
            (``with torch.device("meta")``).
        meshes: what to try, as :func:`compile` takes it.
        policies: what to try with each mesh: what the backward keeps, for example.
        example_inputs, kwargs, topology, shardings, input_spec, train_step, options: as for
            :func:`compile`.

    Raises:
        ValueError: there is nothing to try.
        TypeError: with policies the model is no function that makes a module.
        Other errors are those of :func:`compile`; only want of memory ends up in the ranking.
    """
    if not meshes:
        raise ValueError("search() needs at least one mesh to try")
    plans = []
    for policy, made in _models(model, policies):
        for mesh in meshes:
            try:
                program = compile(
                    made,
                    example_inputs,
                    kwargs,
                    topology=topology,
                    mesh=mesh,
                    shardings=shardings,
                    input_spec=input_spec,
                    train_step=train_step,
                    options=options,
                )
            except torch.OutOfMemoryError as error:
                plans.append(Plan(_text(mesh), policy, None, str(error)))
                continue
            plans.append(Plan(_text(mesh), policy, program, _why_not(program)))
    return Ranking(tuple(sorted(plans, key=_rank)))


def _models(
    model: nn.Module | Callable[[Any], nn.Module], policies: Sequence[Any]
) -> Iterator[tuple[Any, nn.Module]]:
    if not policies:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"search() takes a module, or policies and what makes it, not {model!r}"
            )
        yield None, model
    for policy in policies:
        made = None if isinstance(model, nn.Module) or not callable(model) else model(policy)
        if not isinstance(made, nn.Module):
            raise TypeError(f"with policies the model is a function that makes it, not {model!r}")
        yield policy, made


def _why_not(program: CompiledProgram) -> str:
    if program.fits is not False:
        return ""
    peak = report.size(program.memory_stats()["peak"])
    return f"it needs {peak} of {report.size(program.memory_bytes)}"


def _rank(plan: Plan) -> tuple[bool, float]:
    seconds = plan.program.estimated_seconds if plan.program is not None else None
    return bool(plan.reason), float("inf") if seconds is None else seconds


def _text(mesh: MeshLike) -> str:
    if isinstance(mesh, Mesh):
        shape, names = mesh.shape, mesh.axis_names
    else:
        shape, names = tuple(mesh[0]), tuple(mesh[1])
    return ", ".join(f"{name}={size}" for name, size in zip(names, shape))


def _cells(plan: Plan) -> tuple[str, ...]:
    program, policy = plan.program, "" if plan.policy is None else str(plan.policy)
    if program is None:
        return plan.mesh, policy, "", "", "", "", ""
    share = program.share_of_peak_flops
    return (
        plan.mesh,
        policy,
        report.seconds(program.estimated_seconds),
        report.seconds(program.compute_seconds),
        report.seconds(program.network_seconds),
        report.size(program.memory_stats().get("peak")),
        "" if share is None else f"{share:.1%}",
    )
