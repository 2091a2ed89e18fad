"""Settings, and the choice of the platform that follows from them."""

from __future__ import annotations

import os
import re
import sys

import pytest
import torch

from lazyxla import platforms
from lazyxla.config import FIELDS, Settings
from tests.settings_table import FILE, updated

# --- Settings ------------------------------------------------------------------------------------


def test_defaults_and_variables():
    settings = Settings({})
    assert {field.name: getattr(settings, field.name) for field in FIELDS} == {
        field.name: field.default for field in FIELDS
    }
    assert all(field.variable.startswith("LAZYXLA_") for field in FIELDS)
    settings = Settings(
        {"LAZYXLA_PLATFORM": "TPU", "LAZYXLA_CPU_DEVICES": "8", "LAZYXLA_STRICT": "on"}
    )
    assert (settings.platform, settings.cpu_devices, settings.strict_fallback) == ("tpu", 8, True)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("LAZYXLA_PLATFORM", "gpu", "one of auto, cpu, cuda, tpu"),
        ("LAZYXLA_CPU_DEVICES", "two", "an integer"),
        ("LAZYXLA_CPU_DEVICES", "0", "at least 1"),
        ("LAZYXLA_STRICT", "maybe", "one of 1, true, yes, on, 0, false, no, off"),
        ("LAZYXLA_MAX_PENDING", "-1", "at least 1"),
    ],
)
def test_bad_variable(variable, value, expected):
    with pytest.raises(ValueError, match=rf"{variable}='{value}': expected .*{expected}"):
        Settings({variable: value})


def test_unknown_variable():
    with pytest.warns(UserWarning, match="LAZYXLA_PLATFROM .* did you mean LAZYXLA_PLATFORM"):
        Settings({"LAZYXLA_PLATFROM": "cpu"})


def test_assigning_settings():
    settings = Settings({})
    heard = []
    settings.max_pending_nodes = 7
    settings.on_change(lambda name, value: heard.append((name, value)))
    assert ("max_pending_nodes", 7) in heard
    settings.strict_fallback = True
    assert heard[-1] == ("strict_fallback", True)
    with pytest.raises(ValueError, match="strict_fallback is a bool, got 1"):
        settings.strict_fallback = 1  # type: ignore[assignment]
    with pytest.raises(ValueError, match="cpu_devices = 0: expected an integer of at least 1"):
        settings.cpu_devices = 0
    with pytest.raises(AttributeError, match="no setting 'strict_falback'; did you mean strict_"):
        settings.strict_falback = True  # type: ignore[attr-defined]


def test_readme_lists_the_settings():
    text = FILE.read_text()
    assert updated(text) == text, "README.md is not up to date: `make docs` writes it anew"


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_descriptions(field):
    """A clause of one line, then sentences; what is linked to is there."""
    assert field.doc[0].islower() or field.doc.startswith("MiB")
    assert not field.doc.endswith(".")
    assert "\n" not in field.doc
    assert "|" not in field.doc
    assert len(field.doc) <= 100
    assert not field.details or field.details.endswith(".")
    if field.page:
        page, _, anchor = field.page.partition("#")
        headings = re.findall(r"^#+ (.*)$", (FILE.parent / page).read_text(), re.MULTILINE)
        anchors = [re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings]
        assert not anchor or anchor in anchors


def test_cache_directory(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert Settings({}).cache_directory() == os.path.join("/somewhere", "lazyxla")
    assert Settings({"LAZYXLA_CACHE_DIR": "/else"}).cache_directory() == "/else"


# --- Platforms -----------------------------------------------------------------------------------


def resolve(**environment: str) -> platforms.Platform:
    return platforms.resolve(Settings(environment))


def test_resolve_cpu():
    platform = resolve(LAZYXLA_PLATFORM="cpu", LAZYXLA_CPU_DEVICES="4")
    assert (platform.name, platform.device_bound, platform.bound_is_exact) == ("cpu", 4, True)
    assert platform.create_options == {"cpu_device_count": 4}
    assert os.path.isfile(platform.path)


def test_resolve_order(monkeypatch):
    installed = {"cpu": "/cpu.so", "cuda": "/cuda.so", "tpu": "/tpu.so"}
    nodes = {"accel": 0, "nvidia": 0}
    monkeypatch.setattr(platforms, "plugin_of", installed.get)
    monkeypatch.setattr(platforms, "tpu_chips", lambda: nodes["accel"])
    monkeypatch.setattr(platforms, "_count_nodes", lambda directory, pattern: nodes["nvidia"])
    assert resolve().name == "cpu"
    nodes["nvidia"] = 2
    assert (resolve().name, resolve().device_bound) == ("cuda", 2)
    nodes["accel"] = 4
    assert (resolve().name, resolve().device_bound) == ("tpu", 8)
    del installed["tpu"]
    assert resolve().name == "cuda"
    assert resolve(LAZYXLA_PLATFORM="cpu").name == "cpu"


@pytest.mark.parametrize("name", ["cuda", "tpu", "cpu"])
def test_plugin_not_installed(monkeypatch, name):
    monkeypatch.setattr(platforms, "plugin_of", lambda name: None)
    with pytest.raises(ImportError, match=rf"'{name}' is not installed: pip install .*{name}"):
        resolve(LAZYXLA_PLATFORM=name)


def test_plugin_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"LAZYXLA_PLUGIN_PATH .* names no file: /no/such"):
        resolve(LAZYXLA_PLUGIN_PATH="/no/such.so")
    library = tmp_path / "plugin.so"
    library.touch()
    assert resolve(LAZYXLA_PLUGIN_PATH=str(library)).name == ""
    named = resolve(LAZYXLA_PLUGIN_PATH=str(library), LAZYXLA_PLATFORM="tpu")
    assert (named.name, named.path) == ("tpu", str(library))


def test_no_tpu_is_told_at_once(monkeypatch):
    monkeypatch.setattr(platforms, "plugin_of", lambda name: "/tpu.so")
    monkeypatch.setattr(platforms, "tpu_chips", lambda: 0)
    with pytest.raises(RuntimeError, match=r"no TPU is attached .* LAZYXLA_PLUGIN_PATH=/tpu.so"):
        resolve(LAZYXLA_PLATFORM="tpu")
    monkeypatch.setattr(platforms, "tpu_chips", lambda: 4)
    assert resolve(LAZYXLA_PLATFORM="tpu").name == "tpu"


def test_either_cuda_plugin(monkeypatch, tmp_path):
    package = tmp_path / "jax_plugins" / "xla_cuda12"
    package.mkdir(parents=True)
    (package / "xla_cuda_plugin.so").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # the other one may be installed,
    for name in [name for name in sys.modules if name.partition(".")[0] == "jax_plugins"]:
        monkeypatch.delitem(sys.modules, name)  # and imported by JAX
    assert resolve(LAZYXLA_PLATFORM="cuda").path == str(package / "xla_cuda_plugin.so")


def test_create_options():
    platform = resolve(LAZYXLA_PLATFORM="cpu", LAZYXLA_CREATE_OPTIONS="cpu_device_count=3,x=true")
    assert platform.create_options == {"cpu_device_count": 3, "x": True}
    with pytest.raises(ValueError, match="LAZYXLA_CREATE_OPTIONS='x': expected name=value"):
        Settings({"LAZYXLA_CREATE_OPTIONS": "x"})


def test_a_plugin_of_another_platform(run_python, tmp_path):
    """An installed package that brings a plugin: here another name for the CPU's."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lazyxla.plugins]\nother = other_plugin:plugin\n")
    cpu = resolve(LAZYXLA_PLATFORM="cpu").path
    (tmp_path / "other_plugin.py").write_text(
        f"def plugin():\n    return {cpu!r}, {{'cpu_device_count': 3}}\n"
    )
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import lazyxla, torch
x = torch.tensor([3.0, 1.0, 2.0], device="lazyxla")
print(lazyxla.platform(), lazyxla.device_count(), x.cumsum(0).sort().values.tolist())
"""
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    told = run_python(script, LAZYXLA_PLATFORM="other", PYTHONPATH=path).stdout
    assert told == "other 3 [3.0, 4.0, 6.0]\n"


def test_a_failed_start_tells_where_to_look(run_python, tmp_path):
    library = tmp_path / "plugin.so"
    library.write_bytes(b"no library")
    for platform, hint in (("tpu", "`lsof /dev/accel* /dev/vfio/*`"), ("cuda", "`nvidia-smi`")):
        result = run_python(
            "import lazyxla; lazyxla._C.device_count()",
            check=False,
            LAZYXLA_PLATFORM=platform,
            LAZYXLA_PLUGIN_PATH=str(library),
        )
        assert hint in result.stderr


def test_start_is_quiet(run_python):
    result = run_python("import lazyxla; print(lazyxla._C.device_count())", LAZYXLA_CPU_DEVICES="1")
    assert (result.stdout, result.stderr) == ("1\n", "")


def test_using_a_device_without_its_plugin(run_python):
    result = run_python(
        "import lazyxla; assert not lazyxla.is_available(); lazyxla._C.device_count()",
        check=False,
        LAZYXLA_PLUGIN_PATH="/no/such.so",
    )
    assert "LAZYXLA_PLUGIN_PATH (setting plugin_path) names no file" in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no library", "invalid ELF header|file too short"), (None, "GetPjrtApi")],
)
def test_broken_plugin(run_python, tmp_path, content, message):
    """A file that is no library, and a library that is no plugin."""
    library = tmp_path / "plugin.so"
    if content is None:
        library.symlink_to(torch._C.__file__)
    else:
        library.write_bytes(content)
    result = run_python(
        "import torch, lazyxla; torch.ones(2).to('lazyxla')",
        check=False,
        LAZYXLA_PLUGIN_PATH=str(library),
    )
    assert result.returncode == 1
    assert str(library) in result.stderr
    assert re.search(message, result.stderr), result.stderr
