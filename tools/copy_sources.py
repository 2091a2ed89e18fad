"""Copies the working tree into a folder, for `make test TORCH=...`: what changed, no more.

    python tools/copy_sources.py build/versions/NAME

Files keep their times, so that what was built in the folder is built anew only where its sources
changed. What the folder has got besides (its environment, its build) stays.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def copy(target: Path) -> None:
    """Makes ``target`` have the files of the working tree that git knows or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
        text=True,
    )
    files = {name for name in listed.stdout.split("\0") if name and Path(name).is_file()}
    target.mkdir(parents=True, exist_ok=True)
    manifest = target / ".copied"
    before = set(manifest.read_text().split("\0")) if manifest.exists() else set()
    for name in before - files:
        (target / name).unlink(missing_ok=True)
    manifest.write_text("\0".join(sorted(files)))
    for name in files:
        source, copied = Path(name), target / name
        if not copied.exists() or copied.stat().st_mtime_ns != source.stat().st_mtime_ns:
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copied)


if __name__ == "__main__":
    copy(Path(sys.argv[1]))
