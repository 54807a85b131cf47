"""Decode a file's bytes to text: unpack gzip, and raise errors for files that are not text."""

from __future__ import annotations

import codecs
import gzip
import io
import pathlib
import re
import zlib

from shardrules.errors import HloError

_GZIP = b"\x1f\x8b"
_WIDE = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, since its mark begins with UTF-16's mark
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# Bytes that no text contains; a protocol buffer has some among its first bytes.
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f]")
_LOOKED_AT = 1 << 16  # bytes
# A small file may unpack to gigabytes. The limit is five times the longest text in the benchmarks;
# reading and judging take several times as much memory.
_MOST_UNPACKED = 512  # MiB
_CHUNK = 1 << 20  # bytes, a MiB
_INSTEAD = (
    "pass text: compiled.as_text(), or of --xla_dump_to with --xla_dump_hlo_as_text the file that "
    "ends in after_optimizations.txt"
)


_OPTIMIZED = re.compile(r"(.+)\.(?:[^./]*_)?after_optimizations\.(?:txt|hlo)(?:\.gz)?")


def before_optimizations(path: pathlib.Path) -> pathlib.Path | None:
    """Return the dump's file from before XLA's passes, given the file from after them, or None."""
    # Before: module_0001.jit_f.before_optimizations.txt. After: .cl_933746096.after_... on TPU,
    # .cpu_after_... on CPU, .sm_9.0_gpu_after_... on GPU.
    match = _OPTIMIZED.fullmatch(path.name)
    stem = match[1] if match else ""
    while stem:
        for ending in (".txt", ".txt.gz"):
            beside = path.with_name(f"{stem}.before_optimizations{ending}")
            if beside.is_file():
                return beside
        stem = stem.rpartition(".")[0]
    return None


def decode(data: bytes, name: str) -> str:
    """Return a file's bytes as text; raise HloError if they are not text."""
    # Look for the kinds of files that people pass by mistake, from the most specific kind to the
    # least, so that the error names the kind.
    if data.startswith(_GZIP):
        try:
            data = _unpacked(data, name)
        except EOFError:
            raise HloError(f"{name} is cut off: its gzip data has no end", name=name) from None
        except (OSError, zlib.error) as error:
            raise HloError(f"{name} is damaged: gzip says {error}", name=name) from None
    for mark, encoding in _WIDE.items():
        if data.startswith(mark) and _decodes(data, encoding):
            raise HloError(
                f"{name} is {encoding}; write it as UTF-8: iconv -f {encoding} -t UTF-8 {name}",
                name=name,
            )
    if data.startswith(b"ML\xefR"):
        raise HloError(f"{name} is MLIR bytecode, not HLO text; {_INSTEAD}", name=name)
    if _CONTROL.search(data[:_LOOKED_AT]):
        raise HloError(
            f"{name} is binary (a protocol buffer or a serialized program), not HLO text; "
            f"{_INSTEAD}",
            name=name,
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise HloError(
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} in line {line} is "
            "invalid there; write it as UTF-8 (iconv -f LATIN1 -t UTF-8, if it is Latin-1)",
            name=name,
            line=line,
        ) from error


def _unpacked(data: bytes, name: str) -> bytes:
    """Return the decompressed bytes; raise HloError before they fill the memory."""
    parts, count = [], 0
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
        while part := packed.read(_CHUNK):
            count += len(part)
            if count > _MOST_UNPACKED << 20:
                raise HloError(
                    f"{name} holds more than {_MOST_UNPACKED} MiB of text, the limit for gzip "
                    "data; if it is one module, decompress it (gunzip) and pass the text",
                    name=name,
                )
            parts.append(part)
    return b"".join(parts)


def _decodes(data: bytes, encoding: str) -> bool:
    try:
        return "\0" not in codecs.getincrementaldecoder(encoding)().decode(data[:_LOOKED_AT])
    except UnicodeDecodeError:
        return False
