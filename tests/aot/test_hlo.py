"""What is read of optimized programs: loops, groups of devices, products, and links between chips.

The programs are written by hand, so that no compiler is needed.
"""

from __future__ import annotations

import pytest
from jaxlib import _hlo

from lazyxla.aot import flops, hlo
from lazyxla.aot.collectives import Collectives, Grid, collectives_of
from lazyxla.aot.links import Links, Network

GRID = Grid((("data", 2), ("model", 4)), tuple(range(8)))
LINE = Network(Links(100e9, ring=16), tuple((i, 0, 0) for i in range(8)))


def _program(text: str) -> hlo.Program:
    module = _hlo.hlo_module_from_text(text)
    return hlo.Program(module.as_serialized_hlo_module_proto())


def _loop(condition: str, start: int = 0, step: int = 1) -> hlo.Program:
    """A loop with a product and an all-gather."""
    return _program(f"""
HloModule loop

body (state: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  state = (s32[], f32[8,8]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  step = s32[] constant({step})
  next = s32[] add(i, step)
  x = f32[8,8] get-tuple-element(state), index=1
  part = f32[2,8] slice(x), slice={{[0:2], [0:8]}}
  whole = f32[8,8] all-gather(part), channel_id=1, replica_groups=[2,4]<=[8], dimensions={{0}},
    use_global_device_ids=true
  y = f32[8,8] dot(x, whole), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT result = (s32[], f32[8,8]) tuple(next, y)
}}

condition (state: (s32[], f32[8,8])) -> pred[] {{
  state = (s32[], f32[8,8]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  end = s32[] constant(32)
  ROOT more = pred[] {condition}
}}

ENTRY main (x: f32[8,8]) -> f32[8,8] {{
  x = f32[8,8] parameter(0)
  zero = s32[] constant({start})
  copied = s32[] copy(zero)
  before = (s32[], f32[8,8]) tuple(copied, x)
  after = (s32[], f32[8,8]) while(before), condition=condition, body=body
  ROOT y = f32[8,8] get-tuple-element(after), index=1
}}
""")  # fmt: skip


@pytest.mark.parametrize(
    ("start", "step", "direction", "count"),
    [(0, 1, "LT", 32), (2, 5, "LT", 6), (-4, 4, "NE", 9), (40, 1, "LT", 0)],
)
def test_loops_count_as_often_as_they_run(
    start: int, step: int, direction: str, count: int
) -> None:
    program = _loop(f"compare(i, end), direction={direction}", start, step)
    assert program.unknown_loops == []
    assert flops.repeated(program) == (count - 1) * 2 * 8 * 8 * 8
    found = collectives_of(program, GRID, LINE)
    if count:
        seconds = count * 8 * 8 * 4 * 3 / 4 / 100e9
        (row,) = found
        assert (row.kind, row.axes, row.count) == ("all-gather", "model", count)
        assert row.nbytes == count * 8 * 8 * 4
        assert row.seconds == pytest.approx(seconds)
        assert row.overlapped_seconds == 0
    else:
        assert found == ()


def test_a_loop_of_unknown_length_counts_once_and_is_named() -> None:
    program = _loop("compare(i, end), direction=GT")
    assert program.unknown_loops == ["after"]
    assert flops.repeated(program) == 0
    assert [row.count for row in collectives_of(program, GRID, LINE)] == [1]


_SUM = """
sum (a: f32[], b: f32[]) -> f32[] {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
"""


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", "model"),
        ("[2,4]<=[8]", "model"),
        ("[4,2]<=[2,4]T(1,0)", "data"),
        ("[1,8]<=[8]", "data, model"),
        ("{}", "data, model"),
        ("{{0,2},{1,3},{4,6},{5,7}}", "model (2 of 4)"),
        ("mesh['a'=2,'b'=4] {'a'}", "data"),
        ("mesh['a'=2,'b'=4] {'b'}", "model"),
        ("mesh['a'=8] {'a':(2)2}", "model (2 of 4)"),
    ],
)
def test_groups_of_devices_are_named_by_the_axes_of_the_mesh(groups: str, axes: str) -> None:
    program = _program(f"""
HloModule reduction
{_SUM}
ENTRY main (x: f32[64]) -> f32[64] {{
  x = f32[64] parameter(0)
  ROOT y = f32[64] all-reduce(x), channel_id=1, replica_groups={groups},
    use_global_device_ids=true, to_apply=sum
}}
""")  # fmt: skip
    assert collectives_of(program, GRID, None) == (
        Collectives("all-reduce", axes, 1, 256, None, None),
    )


def test_what_is_reduced_and_cut_is_a_reduce_scatter() -> None:
    program = _program(f"""
HloModule scatter
{_SUM}
fused (x: f32[64]) -> f32[16] {{
  x = f32[64] parameter(0)
  y = f32[64] all-reduce(x), channel_id=1, replica_groups=[2,4]<=[8],
    use_global_device_ids=true, to_apply=sum
  zero = s32[] constant(0)
  ROOT part = f32[16] dynamic-slice(y, zero), dynamic_slice_sizes={{16}}
}}

ENTRY main (x: f32[64]) -> f32[16] {{
  x = f32[64] parameter(0)
  ROOT part = f32[16] fusion(x), kind=kCustom, calls=fused
}}
""")  # fmt: skip
    (row,) = collectives_of(program, GRID, LINE)
    assert (row.kind, row.axes, row.count, row.nbytes) == ("reduce-scatter", "model", 1, 256)


def test_parts_of_an_asynchronous_collective_count_once_and_overlap() -> None:
    gather = (
        "all-gather(x), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}, "
        "use_global_device_ids=true, backend_config="
    )
    begin, go_on = (
        f'{{"async_collective_fusion_config":{{"flag_start":"{flag}"}}}}' for flag in (-1, 2)
    )
    program = _program(f"""
HloModule parts

start (x: f32[16]) -> f32[64] {{
  x = f32[16] parameter(0)
  ROOT y = f32[64] {gather}{begin}
}}

done (x: f32[16]) -> f32[64] {{
  x = f32[16] parameter(0)
  ROOT y = f32[64] {gather}{go_on}
}}

ENTRY main (x: f32[16]) -> (f32[64], f32[64], f32[16]) {{
  x = f32[16] parameter(0)
  y = f32[64] fusion(x), kind=kCustom, calls=start
  step = f32[64] fusion(x), kind=kCustom, calls=done
  z = f32[64] fusion(x), kind=kCustom, calls=done
  begun = (f32[16], f32[16]) collective-permute-start(x), channel_id=8,
    source_target_pairs={{{{0,4}},{{4,0}}}}
  moved = f32[16] collective-permute-done(begun)
  ROOT all = (f32[64], f32[64], f32[16]) tuple(y, z, moved)
}}
""")  # fmt: skip
    gathered, permuted = collectives_of(program, GRID, LINE)
    assert (gathered.kind, gathered.axes, gathered.count) == ("all-gather", "model", 1)
    assert gathered.overlapped_seconds == gathered.seconds
    assert (permuted.kind, permuted.axes, permuted.nbytes) == ("collective-permute", "data", 64)
    assert permuted.overlapped_seconds == permuted.seconds == 64 / 100e9


def test_what_a_kernel_says_of_itself_counts_as_often_as_its_loop_runs() -> None:
    program = _program("""
HloModule kernels

body (x: f32[8]) -> f32[8] {
  x = f32[8] parameter(0)
  ROOT y = f32[8] custom-call(x), custom_call_target="tpu_custom_call",
    backend_config={"custom_call_config":{"cost_estimate":{"flops":"30"}}}
}

condition (x: f32[8]) -> pred[] {
  x = f32[8] parameter(0)
  ROOT more = pred[] constant(true)
}

ENTRY main (x: f32[8]) -> f32[8] {
  x = f32[8] parameter(0)
  ROOT y = f32[8] while(x), condition=condition, body=body,
    backend_config={"known_trip_count":{"n":"5"}}
}
""")
    assert flops.repeated(program) == 4 * 30


def test_products_are_counted_also_as_convolutions() -> None:
    program = _program("""
HloModule products

ENTRY main (x: f32[4,6], w: f32[6,5], image: f32[2,3,8], kernel: f32[7,3,3])
  -> (f32[4,5], f32[2,7,8]) {
  x = f32[4,6] parameter(0)
  w = f32[6,5] parameter(1)
  image = f32[2,3,8] parameter(2)
  kernel = f32[7,3,3] parameter(3)
  y = f32[4,5] convolution(x, w), dim_labels=bf_io->bf
  z = f32[2,7,8] convolution(image, kernel), window={size=3 pad=1_1}, dim_labels=bf0_oi0->bf0
  ROOT both = (f32[4,5], f32[2,7,8]) tuple(y, z)
}
""")  # fmt: skip
    counted = flops.products(program.computations[program.entry])
    # At both ends one of the three elements of the window meets padding.
    assert counted == 2 * 4 * 5 * 6 + 2 * 2 * 7 * 3 * (3 * 8 - 2)


def test_products_at_the_highest_precision_are_counted() -> None:
    """Those of float32 only, as often as a loop runs them."""
    program = _program("""
HloModule precisions

body (x: f32[8,8]) -> f32[8,8] {
  x = f32[8,8] parameter(0)
  ROOT y = f32[8,8] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0},
    operand_precision={highest,highest}
}

condition (x: f32[8,8]) -> pred[] {
  x = f32[8,8] parameter(0)
  ROOT more = pred[] constant(true)
}

ENTRY main (x: f32[8,8], w: bf16[8,8]) -> (f32[8,8], f32[8,8], f32[8,8], bf16[8,8], f32[8,8]) {
  x = f32[8,8] parameter(0)
  w = bf16[8,8] parameter(1)
  a = f32[8,8] convolution(x, x), dim_labels=bf_io->bf, operand_precision={highest,highest}
  b = f32[8,8] convolution(x, x), dim_labels=bf_io->bf, operand_precision={high,high}
  c = f32[8,8] convolution(x, x), dim_labels=bf_io->bf
  d = bf16[8,8] convolution(w, w), dim_labels=bf_io->bf, operand_precision={highest,highest}
  e = f32[8,8] while(x), condition=condition, body=body,
    backend_config={"known_trip_count":{"n":"5"}}
  ROOT all = (f32[8,8], f32[8,8], f32[8,8], bf16[8,8], f32[8,8]) tuple(a, b, c, d, e)
}
""")
    assert flops.at_highest_precision(program) == (1 + 5) * 2 * 8 * 8 * 8


CUBE = Network(
    Links(100e9, ring=4), tuple((i, j, k) for i in range(4) for j in range(4) for k in range(4))
)
ROW, PLANE, ALL = range(4), range(16), range(64)


@pytest.mark.parametrize(
    ("network", "kind", "group", "seconds"),
    [
        # A line has one link in each direction; a ring two; a plane of rings four.
        (LINE, "all-gather", range(8), 7 / 8 / 100e9),
        (CUBE, "all-gather", ROW, 3 / 4 / 200e9),
        (CUBE, "reduce-scatter", PLANE, 15 / 16 / 400e9),
        (CUBE, "all-reduce", ALL, 2 * 63 / 64 / 600e9),
        (CUBE, "all-gather", range(2), 1 / 2 / 100e9),
        (LINE, "all-to-all", range(8), 8 / 4 / 100e9),
        (CUBE, "all-to-all", ROW, 4 / 4 / 200e9),
        (CUBE, "collective-permute", (0, 1), 1 / 100e9),
        (CUBE, "all-gather", (0,), 0.0),
    ],
)
def test_the_time_of_a_collective(
    network: Network, kind: str, group: range, seconds: float
) -> None:
    assert network.seconds(kind, 10**9, group) == pytest.approx(1e9 * seconds)
