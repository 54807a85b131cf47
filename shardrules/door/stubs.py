"""Register stubs for FFI targets whose library isn't loaded, so that programs compile.

XLA looks up a target's handler when it compiles. A stub is a handler in the C API of XLA's FFI that
reports the API's version, and returns an error for any other request, such as to run.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re
from typing import Any

from shardrules.door import seams, versions

_MISSING = re.compile(r"No FFI handler registered for (\S+) on a platform CUDA")
_METADATA = 1  # the type of the extension with which XLA asks for the version
_UNIMPLEMENTED = 12

_clients: list[Any] = []  # the clients whose programs get stubs


def _struct(**fields: Any) -> Any:
    """Return a struct of XLA's C API; each begins with its size."""
    all_fields = [("size", ctypes.c_size_t), *fields.items()]
    return type("Struct", (ctypes.Structure,), {"_fields_": all_fields})


_Version = _struct(extension=ctypes.c_void_p, major=ctypes.c_int, minor=ctypes.c_int)
_Metadata = _struct(version=_Version)  # further fields stay zero
_Extension = _struct(type=ctypes.c_int, next=ctypes.c_void_p, metadata=ctypes.POINTER(_Metadata))
_NewError = _struct(extension=ctypes.c_void_p, message=ctypes.c_char_p, code=ctypes.c_int)
_Api = _struct(
    extension=ctypes.c_void_p,
    version=_Version,
    internal=ctypes.c_void_p,
    new_error=ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_NewError)),
)
_Frame = _struct(extension=ctypes.POINTER(_Extension), api=ctypes.POINTER(_Api))
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
_handlers: dict[str, Any] = {}  # XLA keeps their addresses


def stubs_are_known() -> bool:
    """Return whether this JAX accepts the version that a stub reports; JAX 0.6 reads another."""
    import jax

    return versions.release(jax.__version__)[:2] >= (0, 8)


def allow(client: Any) -> None:
    """Register a stub for each target that a client's programs call and that has no handler."""
    if not _clients:
        for key in ("compile_by_xla", "compile_and_load"):
            seams.intercept(key, _compile)
    if client not in _clients:
        _clients.append(client)


def _compile(original: Any, backend: Any, *args: Any, **options: Any) -> Any:
    # Each error names a missing target: register a stub for it and compile again. This ends, since
    # each round registers another target, and an error about a registered one is raised.
    while True:
        try:
            return original(backend, *args, **options)
        except Exception as error:
            missing = _MISSING.search(str(error))
            if missing is None or backend not in _clients or missing[1] in _handlers:
                raise
            _register(missing[1])


@functools.cache
def _spoken() -> tuple[int, int]:
    """Return the version of this JAX's FFI from its header, since XLA doesn't tell handlers."""
    from jax import ffi

    text = pathlib.Path(ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    major, minor = (re.search(rf"XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    return int(major[1]) if major else 0, int(minor[1]) if minor else 0


def _register(target: str, platform: str = "CUDA") -> None:
    from jax import ffi

    message = (
        f"the FFI target {target!r} is a stub of shardrules.aot.gpu(..., stubs=True): it can be "
        "compiled, not run; load the library that holds it in a new process"
    ).encode()

    def stub(frame: Any) -> Any:
        extension, api = frame.contents.extension, frame.contents.api.contents
        if extension and extension.contents.type == _METADATA:
            version = extension.contents.metadata.contents.version
            version.major, version.minor = _spoken()
            return None
        error = _NewError(ctypes.sizeof(_NewError), None, message, _UNIMPLEMENTED)
        return api.new_error(ctypes.byref(error))

    handler = _handlers[target] = _Handler(stub)
    address = ctypes.cast(handler, ctypes.c_void_p)
    ffi.register_ffi_target(target, ffi.pycapsule(address), platform=platform)
