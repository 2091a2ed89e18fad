"""A base class that PyTorch 2.6 has for tests whose processes serve all tests of a class.

Here each test has processes of its own, two of them. To be imported once names are put in.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist

_common_distributed: Any = importlib.import_module("torch.testing._internal.common_distributed")


class MultiProcContinousTest(_common_distributed.MultiProcessTestCase):  # type: ignore[misc]
    """Its processes are in a process group before a test begins."""

    world_size = 2
    rank = 0

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @classmethod
    def backend_str(cls) -> str | None:
        """Of the process group; None for that of the device."""
        return None

    @classmethod
    def opts(cls, high_priority_stream: bool = False) -> None:
        """Of the process group."""

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, *pipe: Any, **options: Any) -> None:
        cls.rank = rank
        url = f"file://{file_name}"
        dist.init_process_group(
            cls.backend_str(), init_method=url, rank=rank, world_size=cls.world_size
        )
        cls.pg = dist.group.WORLD
        cls.setUpClass()  # asks for the rank
        super()._run(rank, test_name, file_name, *pipe, **options)
