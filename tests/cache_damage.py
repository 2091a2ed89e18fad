"""What may befall the files of a cache directory: tests/test_cache_damage.py tries it at random.

Each of DAMAGES changes one entry of a directory, whose entries had the bytes ``good``.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from lazyxla.cache import entries

Bytes = dict[Path, bytes]
Damage = Callable[[Path, Bytes, random.Random], None]


def entry(content: bytes) -> tuple[bytes, bytes]:
    """Key and bytes of a whole entry."""
    assert content.startswith(entries.MAGIC)
    begin = len(entries.MAGIC) + 40
    (size,) = struct.unpack_from("<Q", content, begin)
    return content[begin + 8 : begin + 8 + size], content[begin + 8 + size :]


def packed(key: bytes, content: bytes) -> bytes:
    """The entry of that key and those bytes, with the right checksum."""
    rest = struct.pack("<Q", len(key)) + key + content
    return entries.MAGIC + hashlib.sha1(rest).hexdigest().encode() + rest


def truncate(path: Path, good: Bytes, rng: random.Random) -> None:
    path.write_bytes(good[path][: rng.randrange(len(good[path]))])


def lengthen(path: Path, good: Bytes, rng: random.Random) -> None:
    path.write_bytes(good[path] + rng.randbytes(rng.randint(1, 100)))


def flip_a_bit(path: Path, good: Bytes, rng: random.Random) -> None:
    content = bytearray(good[path])
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zero_a_block(path: Path, good: Bytes, rng: random.Random) -> None:
    """What a machine without power may leave of a file."""
    begin = rng.randrange(len(good[path]))
    path.write_bytes(good[path][:begin] + bytes(len(good[path]) - begin))


def put_noise(path: Path, good: Bytes, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.randrange(5000)))


def put_another(path: Path, good: Bytes, rng: random.Random) -> None:
    path.write_bytes(good[rng.choice(sorted(good))])


def swap(path: Path, good: Bytes, rng: random.Random) -> None:
    kind = path.name.partition("-")[0]
    other = rng.choice([p for p in sorted(good) if p.name.startswith(kind) and p != path])
    path.write_bytes(good[other])
    _clear(other)
    other.write_bytes(good[path])


def rename(path: Path, good: Bytes, rng: random.Random) -> None:
    """Another entry takes its name."""
    put_another(path, good, rng)
    _clear(rng.choice(sorted(good)))


def change_the_key(path: Path, good: Bytes, rng: random.Random) -> None:
    """A whole entry, with the right checksum, of a key that only resembles this one's."""
    key, executable = entry(good[path])
    at = rng.randrange(len(key))
    path.write_bytes(packed(key[:at] + bytes([key[at] ^ 1]) + key[at + 1 :], executable))


def remove(path: Path, good: Bytes, rng: random.Random) -> None:
    path.unlink()


def link(path: Path, good: Bytes, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(rng.choice([p for p in sorted(good) if p != path]))


def make_directory(path: Path, good: Bytes, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("somebody's")


def make_fifo(path: Path, good: Bytes, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def make_socket(path: Path, good: Bytes, rng: random.Random) -> None:
    path.unlink()
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path may have a hundred characters
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(before)


def let_others_write(path: Path, good: Bytes, rng: random.Random) -> None:
    path.chmod(rng.choice((0o666, 0o660, 0o602)))


def give_away(path: Path, good: Bytes, rng: random.Random) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:  # nobody else can
        path.unlink()


DAMAGES: tuple[Damage, ...] = (
    truncate,
    lengthen,
    flip_a_bit,
    zero_a_block,
    put_noise,
    put_another,
    swap,
    rename,
    change_the_key,
    remove,
    link,
    make_directory,
    make_fifo,
    make_socket,
    let_others_write,
    give_away,
)


def is_good(path: Path, good: Bytes) -> bool:
    """Whether a process may use the entry: it is a file with the entry's bytes, and only its
    owner, who is this user, can write to it."""
    if not path.is_file() or path.read_bytes() != good[path]:
        return False
    status = path.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def is_in_the_way(path: Path) -> bool:
    """Whether something that is no file has the entry's place, where it stays."""
    return path.exists() and not path.is_symlink() and not path.is_file()


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def repair(good: Bytes) -> None:
    """All entries as they were."""
    for path, content in good.items():
        _clear(path)
        path.write_bytes(content)
        path.chmod(0o600)
