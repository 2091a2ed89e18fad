"""What the TPU's compiler takes of bounded dynamic dimensions: the table of docs/dynamic_sizes.md.

lazyxla makes no such programs. If one of these fails with a new libtpu, the page is to be changed.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from lazyxla import aot
from lazyxla.aot.compiled import CompiledProgram
from tests.conftest import RunPython
from tests.support import needs_libtpu

pytestmark = needs_libtpu

V5E = "v5e:2x2"
PREFIX = 1024  # bytes ahead of the data of a dynamic array on a TPU: its sizes


def _type(shape: str, *bounds: str) -> str:
    return f"tensor<{shape}, #stablehlo.bounds<{', '.join(bounds)}>>"


X = _type("?x8xf32", "16", "?")
V = _type("?xf32", "16")
IMAGES = _type("?x2x4xf32", "16", "?", "?")
COLUMNS = _type("2x?x4xf32", "?", "16", "?")

_LESS = """({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %p = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
})"""

_CONVOLUTION = (
    "%k = stablehlo.constant dense<1.0> : tensor<3x4x4xf32>\n"
    "%r = stablehlo.convolution(%v, %k) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], "
    "window = {{pad = [[1, 1]]}} {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}} "
    ": ({0}, tensor<3x4x4xf32>) -> {0}"
)


def _reduce(result: str, operand: str, dim: int, taken: str, given: str) -> str:
    return (
        f"%zero_{result} = stablehlo.constant dense<0.0> : tensor<f32>\n"
        f"%{result} = stablehlo.reduce(%{operand} init: %zero_{result}) applies stablehlo.add "
        f"across dimensions = [{dim}] : ({taken}, tensor<f32>) -> {given}\n"
    )


# Name to the result's type and the operations that make %r of %d, an array of type X.
TAKEN = {
    "elementwise": (X, f"%r = stablehlo.exponential %d : {X}"),
    "reduce over it": ("tensor<8xf32>", _reduce("r", "d", 0, X, "tensor<8xf32>")),
    "reduce over another": (V, _reduce("r", "d", 1, X, V)),
    "dot_general, kept": (
        _type("?x?xf32", "16", "16"),
        "%r = stablehlo.dot_general %d, %d, contracting_dims = [1] x [1] : "
        f"({X}, {X}) -> {_type('?x?xf32', '16', '16')}",
    ),
    "dot_general, contracted": (
        "tensor<8x8xf32>",
        "%r = stablehlo.dot_general %d, %d, contracting_dims = [0] x [0] : "
        f"({X}, {X}) -> tensor<8x8xf32>",
    ),
    "broadcast_in_dim": (
        X,
        _reduce("s", "d", 0, X, "tensor<8xf32>")
        + f"%b = stablehlo.broadcast_in_dim %s, dims = [1] : (tensor<8xf32>) -> {X}\n"
        f"%r = stablehlo.divide %d, %b : {X}",
    ),
    "concatenate": (
        _type("?x8xf32", "32", "?"),
        f"%r = stablehlo.concatenate %d, %d, dim = 0 : ({X}, {X}) -> "
        + _type("?x8xf32", "32", "?"),
    ),
    "sort": (X, f'%r = "stablehlo.sort"(%d) <{{dimension = 0 : i64}}> {_LESS} : ({X}) -> {X}'),
    "convolution, batch": (
        IMAGES,
        f"%v = stablehlo.reshape %d : ({X}) -> {IMAGES}\n" + _CONVOLUTION.format(IMAGES),
    ),
    "get_dimension_size": (
        "tensor<i32>",
        f"%r = stablehlo.get_dimension_size %d, dim = 0 : ({X}) -> tensor<i32>",
    ),
    "set_dimension_size to the bound": (
        "tensor<16x8xf32>",
        "%k = stablehlo.constant dense<16> : tensor<i32>\n"
        f"%r = stablehlo.set_dimension_size %d, %k, dim = 0 : ({X}, tensor<i32>) "
        "-> tensor<16x8xf32>",
    ),
    "dynamic_reshape": (
        _type("?xf32", "128"),
        "%k = stablehlo.constant dense<40> : tensor<1xi32>\n"
        f"%r = stablehlo.dynamic_reshape %d, %k : ({X}, tensor<1xi32>) -> " + _type("?xf32", "128"),
    ),
}

_SIZES = (
    f"%n0 = stablehlo.get_dimension_size %d, dim = 0 : ({X}) -> tensor<i32>\n"
    "%n1 = stablehlo.reshape %n0 : (tensor<i32>) -> tensor<1xi32>\n"
    "%n2 = stablehlo.constant dense<8> : tensor<1xi32>\n"
    "%n = stablehlo.concatenate %n1, %n2, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> "
    "tensor<2xi32>\n"
)

# The same, and a part of the message.
REFUSED = {
    "dynamic_broadcast_in_dim": (
        X,
        _SIZES + "%c = stablehlo.constant dense<1.0> : tensor<8xf32>\n"
        "%r = stablehlo.dynamic_broadcast_in_dim %c, %n, dims = [1] : "
        f"(tensor<8xf32>, tensor<2xi32>) -> {X}",
        "'stablehlo.dynamic_broadcast_in_dim' op can't be translated to XLA HLO",
    ),
    "real_dynamic_slice": (
        X,
        _SIZES + "%c = stablehlo.constant dense<2.0> : tensor<16x8xf32>\n"
        "%o = stablehlo.constant dense<0> : tensor<2xi32>\n"
        "%i = stablehlo.constant dense<1> : tensor<2xi32>\n"
        "%r = stablehlo.real_dynamic_slice %c, %o, %n, %i : "
        f"(tensor<16x8xf32>, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>) -> {X}",
        "'stablehlo.real_dynamic_slice' op can't be translated to XLA HLO",
    ),
    "iota": (
        X,
        f"%r = stablehlo.iota dim = 0 : {X}",
        "'stablehlo.iota' op result #0 must be statically shaped tensor",
    ),
    "cholesky": (
        _type("?x2x2xf32", "16", "?", "?"),
        f"%v = stablehlo.slice %d [0:16, 0:4] : ({X}) -> {_type('?x4xf32', '16', '?')}\n"
        f"%m = stablehlo.reshape %v : ({_type('?x4xf32', '16', '?')}) -> "
        f"{_type('?x2x2xf32', '16', '?', '?')}\n"
        f"%r = stablehlo.cholesky %m : {_type('?x2x2xf32', '16', '?', '?')}",
        'CustomCall "Cholesky" is not supported to have a dynamic dimension',
    ),
    "convolution, spatial": (
        COLUMNS,
        f"%u = stablehlo.reshape %d : ({X}) -> {IMAGES}\n"
        f"%v = stablehlo.transpose %u, dims = [1, 0, 2] : ({IMAGES}) -> {COLUMNS}\n"
        + _CONVOLUTION.format(COLUMNS),
        "Dynamic Spatial Convolution is not supported",
    ),
}


def _module(arguments: str, result: str, body: str) -> bytes:
    return (
        f"func.func @main({arguments}) -> {result} {{\n{body}\nreturn %r : {result}\n}}"
    ).encode()


def _with_size(result: str, body: str, form: str) -> bytes:
    """The operations on an argument that is dynamic, or on a static one whose size is set."""
    if form == "argument":
        return _module(f"%d: {X}", result, body)
    sized = (
        "%d = stablehlo.set_dimension_size %x, %size, dim = 0 : "
        f"(tensor<16x8xf32>, tensor<i32>) -> {X}\n"
    )
    return _module("%x: tensor<16x8xf32>, %size: tensor<i32>", result, sized + body)


def _compile(code: bytes) -> CompiledProgram:
    return aot.topology(V5E).compile(code)


forms = pytest.mark.parametrize("form", ["argument", "inside"])


@forms
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str, form: str) -> None:
    result, body = TAKEN[name]
    compiled = _compile(_with_size(result, body, form))
    static = 4096 if form == "argument" else 4096 + 512  # an int32 takes 512 bytes
    prefix = PREFIX if form == "argument" else 0
    assert compiled.memory_stats()["arguments"] == static + prefix


@forms
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, form: str) -> None:
    result, body, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=re.escape(message)):
        _compile(_with_size(result, body, form))


def test_a_dynamic_result_has_a_prefix_even_if_its_type_is_static() -> None:
    body = TAKEN["elementwise"][1].replace(f": {X}", f": ({X}) -> tensor<16x8xf32>")
    for result, code in ((X, TAKEN["elementwise"][1]), ("tensor<16x8xf32>", body)):
        compiled = _compile(_with_size(result, code, "inside"))
        assert compiled.memory_stats()["outputs"] == 4096 + PREFIX
        assert "->f32[<=16,8]" in compiled.optimized_hlo()


def test_a_reduction_leaves_the_padding_out() -> None:
    compiled = _compile(_with_size(*TAKEN["reduce over it"], "inside"))
    assert re.search(r"select\(.*compare.*, .*param", compiled.optimized_hlo())
    raw = TAKEN["set_dimension_size to the bound"][1].replace("%r", "%b")
    raw += "\n" + _reduce("r", "b", 0, "tensor<16x8xf32>", "tensor<8xf32>")
    compiled = _compile(_with_size("tensor<8xf32>", raw, "inside"))
    assert "select(" not in compiled.optimized_hlo()  # it is part of the sum again


def test_the_padding_is_computed() -> None:
    rows = _type("?x256xf32", "512", "?")
    product = "%r = stablehlo.dot_general %d, %w, contracting_dims = [1] x [0] : "
    product += "({0}, tensor<256x256xf32>) -> {0}"
    dynamic, static = (
        _compile(_module(f"%d: {x}, %w: tensor<256x256xf32>", x, product.format(x)))
        for x in (rows, "tensor<512x256xf32>")
    )
    assert dynamic.flops == pytest.approx(2 * 512 * 256 * 256, rel=1e-3)
    assert static.flops == pytest.approx(2 * 512 * 256 * 256, rel=1e-3)


def test_a_size_is_lost_between_two_reshapes() -> None:
    """What a linear layer on (batch, sequence, width) is lowered to: a product of flat rows."""
    rows, flat = _type("4x?x8xf32", "?", "6", "?"), _type("?x8xf32", "24", "?")
    size = f"%r = stablehlo.get_dimension_size %{{}}, dim = 1 : ({rows}) -> tensor<i32>"
    reshaped = f"%f = stablehlo.reshape %d : ({rows}) -> {flat}\n"
    product = (
        "%w = stablehlo.constant dense<1.0> : tensor<8x8xf32>\n"
        "%p = stablehlo.dot_general %f, %w, contracting_dims = [1] x [0] : "
        f"({flat}, tensor<8x8xf32>) -> {flat}\n"
        f"%u = stablehlo.reshape %p : ({flat}) -> {rows}\n"
    )
    kept = _compile(_module(f"%d: {rows}", "tensor<i32>", size.format("d")))
    assert "PadToStatic" in kept.optimized_hlo()
    code = _module(f"%d: {rows}", "tensor<i32>", reshaped + product + size.format("u"))
    lost = _compile(code).optimized_hlo()
    assert "constant(6)" in lost  # the bound
    assert "PadToStatic" not in lost


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("%d: tensor<?x8xf32>", "count_overflow"),
        (f"%d: {X} {{tf.aliasing_output = 0 : i32}}", "Parameter with dynamic shape buffer has"),
    ],
)
def test_what_ends_the_process(argument: str, message: str, run_python: RunPython) -> None:
    taken = re.search(r"tensor<.*?>>?(?= |$)", argument)
    assert taken
    code = _module(argument, taken[0], f"%r = stablehlo.add %d, %d : {taken[0]}")
    result = run_python(
        "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        f"from lazyxla import aot\naot.topology({V5E!r}).compile({code!r})",
        check=False,
    )
    assert result.returncode < 0
    assert message in result.stderr


def training_step(
    batch: int, length: int, vocabulary: int, width: int, hidden: int, masked: bool = False
) -> str:
    """Embedding, two layers with GELU, a mean over `size` tokens, cross entropy, and SGD.

    All tokens are added up, with `masked` the first `size` ones alone.
    """
    import jax
    from jax import numpy as jnp

    jax.config.update("jax_platforms", "cpu")

    def loss(weights: dict[str, Any], tokens: Any, size: Any, labels: Any) -> Any:
        h = weights["embedding"][tokens]
        h = jax.nn.gelu(h @ weights["up"])
        h = jax.nn.gelu(h @ weights["down"])
        if masked:
            h = jnp.where((jnp.arange(length, dtype=jnp.int32) < size)[:, None], h, 0.0)
        mean = h.sum(1) / size.astype(jnp.float32)
        scores = jax.nn.log_softmax(mean @ weights["classes"])
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    def step(weights: dict[str, Any], *rest: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, *rest)
        return value, jax.tree.map(lambda w, g: w - jnp.float32(0.1) * g, weights, gradients)

    shapes = {"embedding": (vocabulary, width), "up": (width, hidden), "down": (hidden, width)}
    shapes |= {"classes": (width, 10)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    rest = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((batch, length), (), (batch,))]
    return jax.jit(step).lower(weights, *rest).as_text()


def with_size(text: str, batch: int, length: int) -> str:
    """The same step, in which the tokens have as many columns as `size` says."""
    tokens = f"tensor<{batch}x{length}xi32>"
    (argument,) = re.findall(rf"(%arg\d+): {tokens}", text)
    (size,) = re.findall(r"(%arg\d+): tensor<i32>", text)
    head, body = re.split(r"(?<=\{)\n(?=    %)", text, maxsplit=1)
    body = re.sub(rf"{argument}\b", "%tokens", body)
    dynamic = f"stablehlo.set_dimension_size {argument}, {size}, dim = 1"
    return f"{head}\n    %tokens = {dynamic} : ({tokens}, tensor<i32>) -> {tokens}\n{body}"


def test_a_training_step() -> None:
    sizes = 4, 96, 512, 64, 128
    dynamic = _compile(with_size(training_step(*sizes), *sizes[:2]).encode())
    static = _compile(training_step(*sizes, masked=True).encode())
    before, after = static.memory_stats(), dynamic.memory_stats()
    assert after["arguments"] == before["arguments"]
    assert after["outputs"] == before["outputs"]
    assert after["peak"] == pytest.approx(before["peak"], rel=0.1)
    assert dynamic.flops == pytest.approx(static.flops, rel=0.1)
