"""The plugin's C functions, called by hand: what JAX never does, or does not tell.

Several clients, each of another "process", live in this one: they share a key-value store that is
a dictionary, and a test launches on them from as many threads.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.spanning import cpu_plugin, plugin_path

Words = ctypes.POINTER(ctypes.c_uint64)
Function = ctypes.CFUNCTYPE(ctypes.c_void_p, Words)
MakeError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, INTERNAL = 3, 4, 5, 6, 13
F32 = 11  # PJRT_Buffer_Type_F32
INT64 = 1  # PJRT_NamedValue_kInt64
HEADER_WORDS = 5  # of PJRT_Api: its size, extensions, and the version of three words


class PjrtError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def int_of(word: int) -> int:
    """A C int, which fills half a word."""
    return ctypes.c_int(word & 0xFFFFFFFF).value


def array(values: Sequence[int]) -> Any:
    return (ctypes.c_uint64 * max(len(values), 1))(*values)


class Api:
    """The table of functions. The fields of nearly all arguments are words of eight bytes."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(plugin_path()))
        library.GetPjrtApi.restype = Words
        self.table = library.GetPjrtApi()
        header = (cpu_plugin().parent / "include" / "pjrt_c_api.h").read_text()
        self.names = re.findall(r"^  _PJRT_API_STRUCT_FIELD\((\w+)\);", header, re.MULTILINE)
        self.run_count = library.spanning_run_count
        self.run_count.restype = ctypes.c_int64

    def call(self, name: str, *fields: Any, out: int = 0) -> list[int]:
        """Calls a function; returns the fields of its arguments, of which `out` follow those given.

        A field is a word, or an array or string, of which the address is passed. Raises PjrtError.
        """
        error, words = self._call(name, *fields, out=out)
        if not error:
            return words
        _, (_, text, size) = self._call("PJRT_Error_Message", error, out=2)
        message = ctypes.string_at(text, size).decode()
        _, (_, code) = self._call("PJRT_Error_GetCode", error, out=1)
        self._call("PJRT_Error_Destroy", error)
        raise PjrtError(int_of(code), message)

    def _call(self, name: str, *fields: Any, out: int = 0) -> tuple[int, list[int]]:
        words = [f if isinstance(f, int) else ctypes.addressof(f) for f in fields]
        size = 2 + len(words) + out
        args = (ctypes.c_uint64 * size)(8 * size, 0, *words)
        function = Function(self.table[HEADER_WORDS + self.names.index(name)])
        if name in ("PJRT_Error_Message", "PJRT_Error_Destroy"):  # which return nothing
            function = ctypes.CFUNCTYPE(None, Words)(ctypes.cast(function, ctypes.c_void_p).value)
        return function(args) or 0, list(args)[2:]


class Store:
    """A key-value store, as the callbacks of PJRT_Client_Create."""

    def __init__(self, overwrites: bool = True) -> None:
        self.values: dict[str, bytes] = {}
        self.overwrites = overwrites
        self._changed = threading.Condition()
        self._handed_out: dict[int, Any] = {}
        self._functions = [Function(f) for f in (self._get, self._put, self._try_get)]
        self._deleter = Deleter(lambda value: self._handed_out.pop(value, None))

    def callbacks(self) -> list[int]:
        """The addresses of get, put and try_get."""
        return [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self._functions]

    def handed_out(self) -> int:
        """How many values the plugin has not given back."""
        return len(self._handed_out)

    def _return(self, value: bytes, args: Any, field: int) -> int:
        memory = ctypes.create_string_buffer(value, len(value))
        args[field] = ctypes.addressof(memory)
        args[field + 1] = len(value)
        args[field + 2] = ctypes.cast(self._deleter, ctypes.c_void_p).value
        self._handed_out[args[field]] = memory
        return 0

    @staticmethod
    def _fail(callback: int, code: int, message: bytes) -> int:
        make_error = MakeError(ctypes.cast(callback, Words)[0])
        return make_error(code, message, len(message))

    def _get(self, args: Any) -> int:
        key = ctypes.string_at(args[2], args[3]).decode()
        with self._changed:
            if self._changed.wait_for(lambda: key in self.values, int_of(args[4]) / 1000):
                return self._return(self.values[key], args, 7)
        return self._fail(args[5], DEADLINE_EXCEEDED, b"nothing came")

    def _try_get(self, args: Any) -> int:
        key = ctypes.string_at(args[2], args[3]).decode()
        with self._changed:
            if key in self.values:
                return self._return(self.values[key], args, 6)
        return self._fail(args[4], NOT_FOUND, b"no such key")

    def _put(self, args: Any) -> int:
        key = ctypes.string_at(args[2], args[3]).decode()
        with self._changed:
            if key in self.values and not self.overwrites:
                return self._fail(args[6], ALREADY_EXISTS, b"there is such a key")
            self.values[key] = ctypes.string_at(args[4], args[5])
            self._changed.notify_all()
        return 0


class Client:
    """A client of process `node` among `nodes`; other options by name."""

    def __init__(self, api: Api, store: Store | None, node: int, nodes: int, **others: int) -> None:
        self.api = api
        self._store = store  # whose callbacks live as long
        options = {"node_id": node, "num_nodes": nodes, **others}
        names = [ctypes.create_string_buffer(name.encode()) for name in options]
        values: list[int] = []
        for name, value in zip(names, options.values(), strict=True):
            values += [56, 0, ctypes.addressof(name), len(name) - 1, INT64, value, 1]
        get, put, try_get = store.callbacks() if store else [0, 0, 0]
        words = [array(values), len(options), get, 0, put, 0, 0, try_get, 0]
        self.raw = api.call("PJRT_Client_Create", *words)[6]

    def destroy(self) -> None:
        self.api.call("PJRT_Client_Destroy", self.raw)

    def list(self, name: str) -> list[int]:
        """A list that a function of the client returns: of devices, or memories."""
        _, pointers, count = self.api.call(f"PJRT_Client_{name}", self.raw, out=2)
        return list(ctypes.cast(pointers, Words)[:count])

    def upload(self, x: np.ndarray, device: int, memory: int = 0) -> int:
        assert x.dtype == np.float32
        x = np.ascontiguousarray(x)
        data = (ctypes.c_char * x.nbytes).from_buffer(x)
        dims = array(x.shape)
        words = [self.raw, data, F32, dims, x.ndim, 0, 0, 0, device, memory, 0]
        *_, event, buffer = self.api.call("PJRT_Client_BufferFromHostBuffer", *words, out=2)
        self.api.call("PJRT_Event_Destroy", event)
        return buffer

    def download(self, buffer: int) -> np.ndarray:
        _, dims, rank = self.api.call("PJRT_Buffer_Dimensions", buffer, out=2)
        result = np.empty(ctypes.cast(dims, Words)[:rank], np.float32)
        data = (ctypes.c_char * result.nbytes).from_buffer(result)
        *_, event = self.api.call("PJRT_Buffer_ToHostBuffer", buffer, 0, data, result.nbytes, out=1)
        self.api.call("PJRT_Event_Await", event)
        self.api.call("PJRT_Event_Destroy", event)
        return result

    def is_deleted(self, buffer: int) -> bool:
        return bool(self.api.call("PJRT_Buffer_IsDeleted", buffer, out=1)[1] & 1)

    def compile(self, text: str, options: bytes) -> Program:
        code, how = ctypes.create_string_buffer(text.encode()), ctypes.create_string_buffer(b"mlir")
        program = array([48, 0, ctypes.addressof(code), len(code) - 1, ctypes.addressof(how), 4])
        serialized = ctypes.create_string_buffer(options, len(options))
        words = [self.raw, program, serialized, len(options)]
        return Program(self, self.api.call("PJRT_Client_Compile", *words, out=1)[4])


class Program:
    def __init__(self, client: Client, raw: int) -> None:
        self.client = client
        self.raw = raw

    def devices(self) -> list[int]:
        words = self.client.api.call("PJRT_LoadedExecutable_AddressableDevices", self.raw, out=2)
        return list(ctypes.cast(words[1], Words)[: words[2]])

    def execute(
        self, rows: list[list[int]], kept: Sequence[int] = (), outputs: int = 1, events: bool = True
    ) -> list[list[int]]:
        """Launches the program on a row of arguments for each device; waits, if for events.

        `kept` are the positions of arguments that may not be donated.
        """
        lists = [array(row) for row in rows]
        results = [array([0] * outputs) for _ in rows]
        done = array([0] * len(rows))
        indices = array(kept)
        options = array([112, 0, 0, 0, 0, 0, 0, ctypes.addressof(indices), len(kept), *[0] * 5])
        self.client.api.call(
            "PJRT_LoadedExecutable_Execute",
            *(self.raw, options, array([ctypes.addressof(x) for x in lists]), len(rows)),
            *(len(rows[0]), array([ctypes.addressof(x) for x in results]), done if events else 0),
            0,
        )
        for event in list(done) if events else []:
            assert event
            self.client.api.call("PJRT_Event_Await", event)
            self.client.api.call("PJRT_Event_Destroy", event)
        return [list(result)[:outputs] for result in results]
