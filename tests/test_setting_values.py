"""Every setting refuses what makes no sense, with its name and what it takes, however it is set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lazyxla
from lazyxla import platforms
from lazyxla.config import FIELDS, Field, Settings

_WORDS = ["", " ", "nonsense", "maybe", "None", "\0", "\udcff", "\n", "-", "é", "x" * 100_000]
_NUMBERS = ["-1", "-0x1", "1.5", "1e3", "nan", "inf", "0x", "--1", "1,000", "1 2", "9" * 5000]
_TOO_LARGE = [str(2**63), str(2**64), hex(2**63), "-" + "9" * 5000, str(-(2**63) - 1)]
_NO_PATHS = ["a\0b", "\0", "\udcff", "   ", "\t\n"]
_NO_OPTIONS = ["x", "=1", "a=1,b", "\0=1", "a=\0", "\udcff=1", f"a={2**63}"]


def absurd(field: Field) -> list[str]:
    """Texts that the field must refuse."""
    if isinstance(field.default, bool):
        return [*_WORDS, *_NUMBERS, *_TOO_LARGE, "2"]
    if isinstance(field.default, int):
        most = ["128", "100000"] if field.name == "cpu_devices" else []
        least = [] if field.name == "cache_size" else ["0"]
        return [*_WORDS, *_NUMBERS, *_TOO_LARGE, *most, *least]
    if field.name in ("platform", "log_level", "compare_collectives"):
        return [*_WORDS, "cpu,tpu", "debug info"]
    if field.name in ("plugin_path", "cache_dir"):
        return _NO_PATHS
    assert field.name in ("create_options", "xla_options")  # a new kind of field needs its list
    return _NO_OPTIONS


REFUSED = [(field, text) for field in FIELDS for text in absurd(field)]
WRONG_TYPES: list[Any] = [
    None,
    1.5,
    float("nan"),
    b"",
    [],
    {},
    object(),
    type,
    10**5000,
    -(10**5000),
    2**63,
    -1,
]


def ids(value: object) -> str | None:
    return value.name if isinstance(value, Field) else ascii(value)[:20]


@pytest.mark.parametrize(("field", "text"), REFUSED, ids=ids)
def test_variables_refuse_it(field: Field, text: str) -> None:
    with pytest.raises(ValueError, match="expected ") as error:
        Settings({field.variable: text})
    assert str(error.value).startswith(f"{field.variable}=")
    assert len(str(error.value)) < 400  # a text of any length


def refuses(settings: Settings, field: Field, value: object) -> str:
    """The message; neither the value has changed nor has anybody heard of it."""
    heard: list[str] = []
    settings.on_change(lambda name, _: heard.append(name))
    heard.clear()
    before = getattr(settings, field.name)
    with pytest.raises(ValueError, match=rf"^setting {field.name} ") as error:
        setattr(settings, field.name, value)
    assert getattr(settings, field.name) == before
    assert not heard
    assert len(str(error.value)) < 400
    return str(error.value)


@pytest.mark.parametrize("field", FIELDS, ids=ids)
def test_assignments_refuse_it(field: Field) -> None:
    settings = Settings({})
    kind = type(field.default)
    if kind is str:
        for text in absurd(field):
            assert ": expected " in refuses(settings, field, text)
    for value in WRONG_TYPES:
        expected = ": expected " if type(value) is kind else f"is a {kind.__name__}, got "
        if value == -1 and kind is not int:
            continue
        assert expected in refuses(settings, field, value)
    other = 1 if kind is not int else True
    assert f"is a {kind.__name__}, got " in refuses(settings, field, other)


@given(st.data())
def test_any_text_is_refused_by_name_or_means_the_same_again(data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(FIELDS))
    text = data.draw(
        st.one_of(
            st.text(),
            st.integers().map(str),
            st.sampled_from([*_WORDS, *_NUMBERS, *_TOO_LARGE]),
            st.lists(st.text(max_size=3)).map("=".join),
        )
    )
    try:
        value = getattr(Settings({field.variable: text}), field.name)
    except ValueError as error:
        refusal = str(error)
        assert refusal.startswith(f"{field.variable}=")
        return
    assert type(value) is type(field.default)
    settings = Settings({})
    setattr(settings, field.name, value)
    assert getattr(settings, field.name) == value


@pytest.fixture
def keep_settings() -> Iterator[None]:
    before = {field.name: getattr(lazyxla.settings, field.name) for field in FIELDS}
    yield
    for name, value in before.items():
        setattr(lazyxla.settings, name, value)


@pytest.mark.parametrize("name", ["max_pending_nodes", "max_programs", "cache_size"])
def test_the_largest_numbers_reach_their_users(keep_settings: None, name: str) -> None:
    most = 2**43 - 1 if name == "cache_size" else 2**63 - 1
    setattr(lazyxla.settings, name, most)
    assert torch.ones(3, device="lazyxla").neg().sum().item() == -3
    with pytest.raises(ValueError, match=f"at most {most}"):
        setattr(lazyxla.settings, name, most + 1)


def test_a_refused_change_is_undone() -> None:
    settings = Settings({})

    def refuse(name: str, value: object) -> None:
        if value == 5:
            raise RuntimeError("no")

    settings.on_change(refuse)
    with pytest.raises(RuntimeError, match="no"):
        settings.max_programs = 5
    assert settings.max_programs == 2000


@pytest.mark.parametrize("count", ["0", "-3", "128", "true", "many", "1.5"])
def test_options_ask_for_a_number_of_devices_that_there_cannot_be(count: str) -> None:
    options = {
        "LAZYXLA_PLATFORM": "cpu",
        "LAZYXLA_CREATE_OPTIONS": f"cpu_device_count={count}",
    }
    with pytest.raises(ValueError, match=r"LAZYXLA_CREATE_OPTIONS .*at least 1 and at most 127"):
        platforms.resolve(Settings(options))


def test_a_plugin_without_devices(run_python: Any) -> None:
    result = run_python(
        "import torch, lazyxla; torch.ones(1).to('lazyxla')",
        check=False,
        LAZYXLA_PLUGIN_PATH=platforms.plugin_of("cpu"),
        LAZYXLA_PLATFORM="auto",
        LAZYXLA_CREATE_OPTIONS="cpu_device_count=0",
    )
    assert result.returncode == 1
    assert "has no devices; what it was started with is LAZYXLA_CREATE_OPTIONS" in result.stderr


def test_a_relative_directory_stays_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    settings = Settings({"LAZYXLA_CACHE_DIR": "warm"})
    monkeypatch.chdir("/")
    assert settings.cache_directory() == str(tmp_path / "warm")
    assert Settings({"LAZYXLA_CACHE_DIR": "~/x"}).cache_directory() == "/home/somebody/x"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert Settings({}).cache_directory() == "/home/somebody/.cache/lazyxla"
