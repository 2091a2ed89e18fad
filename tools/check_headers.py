"""Whether csrc/ compiles against the headers of other versions of torch.

    python tools/check_headers.py 2.11.0 2.12.0 [--jobs 2]

Takes the commands of the last build, and makes no code: it finds what another version lacks in
minutes, where a build takes longer and needs all that torch depends on. Of torch it installs the
package alone, below build/headers/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ROOT / "build" / "editable" / "compile_commands.json"


def headers_of(version: str) -> Path:
    """The torch package of a version."""
    target = ROOT / "build" / "headers" / f"torch-{version}"
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", f"torch=={version}"]
        subprocess.run([*pip, "--target", str(target)], check=True)
    return target / "torch"


def check_only(command: str, package: Path) -> list[str]:
    """A command of the build, for another torch and without output."""
    own = str(Path(torch.__file__).parent)
    words = [
        re.sub(rf"{re.escape(own)}(?=/|$)", str(package), word) for word in shlex.split(command)
    ]
    if Path(words[0]).name == "ccache":
        words = words[1:]
    output = words.index("-o")
    return [*words[:output], *words[output + 2 :], "-fsyntax-only"]


def errors_of(entry: dict[str, str], package: Path) -> list[str]:
    """What the compiler says of a file."""
    done = subprocess.run(
        check_only(entry["command"], package),
        cwd=entry["directory"],
        capture_output=True,
        text=True,
    )
    return (
        [line for line in done.stderr.splitlines() if "error:" in line] if done.returncode else []
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+", help="of torch, such as 2.11.0")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    entries = json.loads(COMMANDS.read_text())
    failed = 0
    for version in options.versions:
        package = headers_of(version)
        with ThreadPoolExecutor(options.jobs) as pool:
            found = list(pool.map(errors_of, entries, itertools.repeat(package)))
        broken = [errors for errors in found if errors]
        for errors in broken:
            print(*errors[:3], sep="\n")
        failed += len(broken)
        print(f"torch {version}: {len(entries)} files, {len(broken)} do not compile")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
