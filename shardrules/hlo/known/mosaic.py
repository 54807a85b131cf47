"""TPU kernels that a program holds as text: do they compute with their operands alone.

A ``tpu_custom_call`` holds its kernel, a module of MLIR. JAX writes it as bytecode; XLA, which
makes kernels of its own (of ``lax.ragged_dot``), as text. Their custom calls have no name and no
tag, so the kernel itself is read: whoever wrote it, it is what runs.
"""

from __future__ import annotations

import base64
import binascii
import json
import re

__all__ = ["is_local"]

# Operations on what a kernel was given, each with one result on every device. Whatever is not here
# may read a device id, a clock or random bits, wait, or copy from another device.
_LOCAL = re.compile(
    r"arith\.\w+|func\.func|memref\.(load|store)|scf\.(for|if|yield)|tpu\.(iota|matmul)|"
    r"vector\.(broadcast|load|shape_cast|store|transpose)"
)
# Names of values, functions and attributes: no operation stands in them. Behind digits a name ends.
_NAMES = re.compile(r"[%@#](\d+|[A-Za-z_$.\-][\w$.\-]*)")
_OPERATIONS = re.compile(r"[A-Za-z_]\w*\.[\w.]+|call")
_TEXT = "bW9kdWxl"  # "module" in base64


def is_local(config: str) -> bool:
    """Tell whether a backend_config holds a kernel whose text names local operations alone."""
    if f'"{_TEXT}' not in config.replace("\\", ""):
        return False
    try:
        if config.startswith('"'):
            config = json.loads(config)
        body = json.loads(config)["custom_call_config"]["body"]
        text = base64.b64decode(body, validate=True).decode()
    except (ValueError, KeyError, TypeError, binascii.Error):
        return False
    # Quotes hold operations in their generic form, and an exclamation mark begins a type that is
    # Mosaic's own: semaphores are.
    if '"' in text or "!" in text:
        return False
    return all(map(_LOCAL.fullmatch, _OPERATIONS.findall(_NAMES.sub("", text))))
