# The extension module, see csrc/bindings/. Its functions are used inside this package only.
from typing import Any

def __getattr__(name: str) -> Any: ...
def run_sparse_on_host(
    name: str, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any: ...
