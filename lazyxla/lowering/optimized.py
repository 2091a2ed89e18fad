"""The optimized HLO module of a program, read by jaxlib's classes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from lazyxla.lowering import wire

Tiles = tuple[list[int], list[list[int]]]
"""How many tiles each dimension of a result has; per partition, its tile's index in each."""


def serialized(program: Any) -> bytes:
    """The module of a compiled program (``_C.CompiledProgram``) as an HloModuleProto.

    Raises:
        RuntimeError: the compiler does not return it, or in an unknown format.
    """
    form, data = program.optimized_program()
    if form == "hlo":
        return data  # type: ignore[no-any-return]
    if form == "hlo_with_config":
        return _first_field(data)
    raise RuntimeError(f"the compiler gives its program in an unknown format, {form!r}")


def module(program: Any) -> Any:
    """The same as jaxlib's ``HloModule``.

    Raises:
        RuntimeError: as `serialized`; or the installed jaxlib does not know what is in it.
    """
    from jaxlib import _hlo  # type: ignore[attr-defined]

    try:
        return _hlo.HloModule.from_serialized_hlo_module_proto(serialized(program))
    except RuntimeError as error:
        raise RuntimeError(
            f"this version of jaxlib cannot read the compiler's program: {error}"
        ) from error


def result_tiles(program: Any, ranks: Sequence[int], partitions: int) -> list[Tiles]:
    """How the results of a partitioned program are split over its devices; `ranks` are the
    results'.

    Raises:
        RuntimeError: as `module`; or the results are not spread as a grid of tiles.
    """
    if partitions == 1:
        return [_whole(rank, 1) for rank in ranks]
    from jaxlib import _hlo  # type: ignore[attr-defined]

    noted = module(program).spmd_output_sharding
    if noted is None:
        raise RuntimeError("the compiled program does not tell how its results are spread")
    # (A single result may be noted as it is, not as a tuple of one.)
    each = noted.tuple_shardings if noted.type == _hlo.OpSharding.Type.TUPLE else [noted]
    shardings = [_hlo.HloSharding.from_proto(one) for one in each]
    return [_tiles(s, rank, partitions) for s, rank in zip(shardings, ranks, strict=True)]


def _whole(rank: int, partitions: int) -> Tiles:
    return [1] * rank, [[0] * rank for _ in range(partitions)]


def _tiles(sharding: Any, rank: int, partitions: int) -> Tiles:
    if sharding.is_replicated():
        return _whole(rank, partitions)
    devices = list(sharding.tile_assignment_devices()) if sharding.is_tiled() else []
    if sorted(devices) != list(range(partitions)):
        raise RuntimeError(f"the partitioner spreads a result in an unknown way: {sharding}")
    grid = list(sharding.tile_assignment_dimensions())  # behind the result's own: equal tiles
    tile_of = [[0] * rank for _ in devices]
    for device, place in zip(devices, itertools.product(*map(range, grid)), strict=True):
        tile_of[device] = list(place[:rank])
    return grid[:rank], tile_of


def _first_field(message: bytes) -> bytes:
    """Field 1 of a protocol buffer, itself a message: of HloModuleProtoWithConfig the module."""
    for number, value in wire.fields(message):
        if number == 1 and isinstance(value, bytes):
            return value
    raise RuntimeError("the compiler's program has no module")
