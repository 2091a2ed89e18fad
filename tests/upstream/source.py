"""Gets PyTorch's tests from Debian's source package, into a directory that git ignores."""

from __future__ import annotations

import re
import subprocess
import tarfile
from pathlib import Path

SUITE, PACKAGE, VERSION = "trixie", "pytorch", "2.6.0"
"""The known failures are those of this version's tests."""


def tests_of_pytorch(cache: Path) -> Path:
    """The directory with the test files, downloaded and unpacked at the first call."""
    tests = cache / f"pytorch-v{VERSION}" / "test"
    if not (tests / "test_torch.py").exists():
        _unpack(_download(cache / "apt"), cache)
    return tests


def _download(directory: Path) -> Path:
    """The archive of the upstream source. apt checks its signature; the machine's lists stay."""
    for part in ("lists/partial", "cache/archives/partial"):
        (directory / part).mkdir(parents=True, exist_ok=True)
    sources = directory / "sources.list"
    sources.write_text(f"deb-src {_repository()} {SUITE} main\n")
    apt = [
        "apt-get",
        *("-o", f"Dir::Etc::SourceList={sources}", "-o", "Dir::Etc::SourceParts=/dev/null"),
        *("-o", f"Dir::State::Lists={directory / 'lists'}"),
        *("-o", f"Dir::Cache={directory / 'cache'}"),
    ]
    subprocess.run([*apt, "-q", "update"], check=True)
    subprocess.run([*apt, "-q", "source", "--download-only", PACKAGE], check=True, cwd=directory)
    found = sorted(directory.glob(f"{PACKAGE}_{VERSION}*.orig.tar.*"))
    if not found:
        raise RuntimeError(f"{SUITE} has no {PACKAGE} {VERSION}: {sorted(directory.iterdir())}")
    return found[-1]


def _repository() -> str:
    """The repository of Debian that this machine is set up with."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [line for line in lines if re.search(r"/debian/?$", line)]
    if not found:
        raise RuntimeError(
            "apt knows no repository of Debian here: give the directory test/ of PyTorch's source "
            "with --source"
        )
    return f"[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {found[0]}"


def _unpack(archive: Path, directory: Path) -> None:
    with tarfile.open(archive) as source:
        wanted = [m for m in source if m.name.startswith(f"pytorch-v{VERSION}/test/")]
        source.extractall(directory, wanted, filter="data")
