"""Options of XLA's compiler for the process and for compiled regions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lazyxla
from lazyxla import _C, platforms
from lazyxla.xla_options import parse
from tests.conftest import RunPython
from tests.support import DEVICE, counted


@pytest.fixture(autouse=True)
def no_options_left() -> Iterator[None]:
    yield
    lazyxla.settings.xla_options = ""


def dumped(directory: Path, size: int) -> bool:
    """Whether a program on an array of this size was compiled with the option xla_dump_to."""
    return any(f"f32[{size}]" in path.read_text() for path in directory.glob("*.txt"))


def test_of_a_region(tmp_path: Path) -> None:
    x = torch.ones(13).to(DEVICE)
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    plain = lazyxla.compile(lambda t: t.cos() + 1)
    dumping = lazyxla.compile(lambda t: t.cos() + 1, xla_options=options)
    with counted() as n:
        first = plain(x)
    assert n.compiles == 1
    assert not dumped(tmp_path, 13)
    with counted() as n:
        second = dumping(x)
    assert n.compiles == 1
    assert dumped(tmp_path, 13)
    with counted() as n:
        for function in (plain, dumping, plain):
            function(x)
    assert (n.compiles, n.executions) == (0, 3)
    torch.testing.assert_close(first.cpu(), second.cpu())


def test_the_outermost_region_decides(tmp_path: Path) -> None:
    inner = {"xla_dump_to": str(tmp_path / "inner"), "xla_dump_hlo_as_text": True}
    outer = {"xla_dump_to": str(tmp_path / "outer"), "xla_dump_hlo_as_text": True}
    x = torch.ones(14, device=DEVICE)
    with lazyxla.compile(xla_options=outer), lazyxla.compile(xla_options=inner):
        y = x.cos() + 2
    torch.testing.assert_close(y.cpu(), torch.ones(14).cos() + 2)
    assert dumped(tmp_path / "outer", 14)
    assert not dumped(tmp_path / "inner", 14)


@pytest.mark.parametrize("mode", [False, True, "fused"])
def test_of_the_process(tmp_path: Path, mode: bool | str) -> None:
    size = {False: 15, True: 16, "fused": 17}[mode]
    x = torch.ones(size).to(DEVICE)
    with lazyxla.eager_mode(mode):  # type: ignore[arg-type]
        y = x.cos()
        lazyxla.sync(wait=True)
        assert not dumped(tmp_path, size)
        lazyxla.settings.xla_options = f"xla_dump_to={tmp_path}, xla_dump_hlo_as_text=true"
        with counted() as n:
            z = x.cos()
            lazyxla.sync(wait=True)
        assert n.compiles == 1
        assert dumped(tmp_path, size)
        lazyxla.settings.xla_options = ""
        with counted() as n:
            again = x.cos()
            lazyxla.sync(wait=True)
        assert (n.compiles, n.executions) == (0, 1)
    assert torch.equal(y.cpu(), z.cpu())
    assert torch.equal(y.cpu(), again.cpu())


def test_a_region_goes_before_the_process(tmp_path: Path) -> None:
    lazyxla.settings.xla_options = f"xla_dump_to={tmp_path / 'process'},xla_dump_hlo_as_text=true"
    with lazyxla.compile(xla_options={"xla_dump_to": str(tmp_path / "region")}):
        x = torch.ones(18, device=DEVICE).cos()
    x.cpu()
    assert dumped(tmp_path / "region", 18)  # as text: the process's other option stays
    assert not (tmp_path / "process").exists()


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="No such compile option: 'xla_no_such_option'"):
        lazyxla.compile(xla_options={"xla_no_such_option": 1})
    with pytest.raises(TypeError, match=r"lazyxla.compile's xla_options must be a dict"):
        lazyxla.compile(xla_options=["xla_cpu_enable_fast_math"])  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="expected name=value,name=value, found 'fast'"):
        lazyxla.settings.xla_options = "fast"
    lazyxla.settings.xla_options = "xla_no_such_option=1"
    x = torch.ones(19, device=DEVICE).cos()
    named = (
        r"LAZYXLA_XLA_OPTIONS .setting xla_options.: .*No such compile option: 'xla_no_such_option'"
    )
    with pytest.raises(RuntimeError, match=named):
        x.cpu()


def test_of_the_environment(run_python: RunPython, tmp_path: Path) -> None:
    run_python(
        "import lazyxla, torch; torch.ones(21, device='lazyxla').cos().cpu()",
        LAZYXLA_XLA_OPTIONS=f"--xla_dump_to={tmp_path},xla_dump_hlo_as_text=True",
    )
    assert dumped(tmp_path, 21)


def test_values_are_read_by_their_form() -> None:
    assert parse("a=true, b=False,--c=3,d=-0.5,e=x=y,") == {
        "a": True,
        "b": False,
        "c": 3,
        "d": -0.5,
        "e": "x=y",
    }
    assert parse("") == {}


@pytest.mark.parametrize(
    "options", [{}, {"xla_cpu_experimental_ynn_fusion_type": ""}], ids=["default", "none"]
)
def test_the_cpus_reductions(tmp_path: Path, options: dict[str, str]) -> None:
    """They are a library's, unless somebody's option says otherwise."""
    x = torch.rand(64, 2048)
    on_device = x.to(DEVICE)
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    with lazyxla.compile(xla_options=dump | options), counted() as n:
        sums = on_device.sum(1)
        lazyxla.sync()
    assert (n.compiles, n.executions) == (1, 1)
    assert _C.compile_options() == platforms._COMPILE_OPTIONS["cpu"]
    torch.testing.assert_close(sums.cpu(), x.sum(1))
    programs = [path.read_text() for path in tmp_path.glob("*cpu_after_optimizations.txt")]
    (text,) = [text for text in programs if "f32[64,2048]" in text]
    assert ("__ynn_fusion" in text) is (options == {})


def test_a_compiler_need_not_know_the_platforms_options(run_python: RunPython) -> None:
    code = """
import torch, lazyxla
from lazyxla import _C, platforms
platforms._COMPILE_OPTIONS["cpu"] |= {"xla_no_such_option": 1, "xla_cpu_max_isa": "AVX2"}
print(torch.ones(3, device="lazyxla").sum().item(), *sorted(_C.compile_options()))
"""
    known = {*platforms._COMPILE_OPTIONS["cpu"], "xla_cpu_max_isa"}
    assert run_python(code).stdout.split() == ["3.0", *sorted(known)]


def test_another_error_does_not_drop_the_platforms_options(
    plugin: Callable[[str], dict[str, str]], run_python: RunPython
) -> None:
    code = "import torch, lazyxla; torch.ones(3, device='lazyxla').sum().item()"
    environment = {"LAZYXLA_PLATFORM": "cpu", "FAILING_COMPILES": "3", **plugin("failing")}
    result = run_python(code, check=False, **environment)
    assert result.returncode != 0
    assert "RESOURCE_EXHAUSTED: no memory" in result.stderr


def test_a_plugin_by_its_path_may_be_the_cpus(run_python: RunPython) -> None:
    code = """
import torch, lazyxla
from lazyxla import _C, platforms
assert platforms.resolve().name == ""
print(torch.ones(3, device="lazyxla").sum().item(), *sorted(_C.compile_options()))
"""
    path = str(platforms.plugin_of("cpu"))
    printed = run_python(code, LAZYXLA_PLATFORM="auto", LAZYXLA_PLUGIN_PATH=path).stdout
    assert printed.split() == ["3.0", *sorted(platforms._COMPILE_OPTIONS["cpu"])]
