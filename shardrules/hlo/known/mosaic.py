"""Read TPU kernels that a program contains as text: does a kernel use only its operands?

A ``tpu_custom_call`` contains its kernel as an MLIR module. JAX writes bytecode. XLA writes text
for the kernels that it generates itself (for ``lax.ragged_dot``); these custom calls have neither a
name nor a tag, so we read the kernel's text, which is the code that runs.
"""

from __future__ import annotations

import base64
import binascii
import json
import re

# Operations that give the same result on every device if a kernel's operands are equal. Any other
# operation may read a device id, a clock or random bits, wait, or copy from another device.
_LOCAL = re.compile(
    r"arith\.\w+|func\.func|memref\.(load|store)|scf\.(for|if|yield)|tpu\.(iota|matmul)|"
    r"vector\.(broadcast|load|shape_cast|store|transpose)"
)
# Names of values, functions and attributes, which are not operations. A number is a whole name.
_NAMES = re.compile(r"[%@#](\d+|[A-Za-z_$.\-][\w$.\-]*)")
_OPERATIONS = re.compile(r"[A-Za-z_]\w*\.[\w.]+|call")
_TEXT = "bW9kdWxl"  # "module" in base64


def is_local(config: str) -> bool:
    """Return whether a backend_config contains a kernel's text, with local operations only."""
    if f'"{_TEXT}' not in config.replace("\\", ""):
        return False
    try:
        if config.startswith('"'):
            config = json.loads(config)
        body = json.loads(config)["custom_call_config"]["body"]
        text = base64.b64decode(body, validate=True).decode()
    except (ValueError, KeyError, TypeError, binascii.Error):
        return False
    # Quotes enclose operations in their generic form. An exclamation mark begins one of Mosaic's
    # own types, such as a semaphore.
    if '"' in text or "!" in text:
        return False
    return all(map(_LOCAL.fullmatch, _OPERATIONS.findall(_NAMES.sub("", text))))
