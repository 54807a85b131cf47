"""The notation of HLO text: comments, brackets, quotes, and ``key=value`` attributes.

A newline counts as a space (XLA's hlo_lexer.cc). So the end of a line doesn't end an instruction:
it ends where no comma with an attribute follows, and a value ends with its own brackets.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from shardrules import errors

# Attributes of instructions that XLA's parser knows (hlo_parser.cc, JAX 0.4.28 to 0.12) or that
# only its printer writes. Any other may have a meaning that the proof does not know.
KNOWN = frozenset(
    "algorithm api_version async_execution_thread backend_config batch_group_count body "
    "branch_computations called_computations calls channel_id collapsed_slice_dims condition "
    "constrain_layout control-predecessors convolution_kind cross_program_prefetch_index "
    "custom_call_has_side_effect custom_call_target delta dim_labels dimensions direction "
    "distribution domain dynamic_slice_sizes epsilon exponent_bits false_computation "
    "feature_group_count feature_index fft_length fft_type frontend_attributes has_dynamic_root "
    "index index_vector_dim indices_are_sorted infeed_config inferred_dimension "
    "inserted_window_dims "
    "input_batching_dims iota_dimension is_associative is_composite is_host_transfer is_reverse "
    "is_scheduled is_stable k kind largest lhs_batch_dims lhs_contracting_dims lhs_ragged_dims "
    "literal lower mantissa_bits metadata num_carries offset_dims operand_batching_dims "
    "operand_layout_constraints operand_precision origin original_value outfeed_config "
    "outfeed_shape output_to_operand_aliasing padding padding_type parameter_replication "
    "replica_groups result_accuracy rhs_batch_dims rhs_contracting_dims rhs_group_dims scatter "
    "scatter_dims_to_operand_dims scatter_indices_batching_dims schedule select sharding slice "
    "slice_sizes source_target_pairs sparsity sparsity_config start_index_map "
    "start_indices_batching_dims statistics to_apply transpose_a true_computation type "
    "unique_indices unit_diagonal update_window_dims use_global_device_ids window".split()
)


_KEY = re.compile(r"([\w\-]+)\s*=")
_QUOTED = r'"[^"\\]*(?:\\.[^"\\]*)*"'
# The most common attributes: the value is a string, a word, text in braces, or
# [4,2]<=[2,4]T(1,0).
_FLAT = r"[^{}()\[\]\"]"
_PLAIN = (
    rf"{_FLAT}++|{_QUOTED}|\[{_FLAT}*+\]|\((?:{_FLAT}++|\{{{_FLAT}*+\}})*+\)"  # aliasing: (1, {})
)
_BRACED = rf"\{{(?:{_PLAIN})*+\}}"
PRINTED = re.compile(
    rf", ([\w\-]+)=(\{{[^{{}}\"]*+\}}|\{{(?:{_PLAIN}|{_BRACED})*+\}}|{_QUOTED}"
    r"|(?:[\w.%\-]+(?:->[\w\-]+)?|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)(?=[,\n]|$))",
    re.DOTALL,
)
_BRACKET = re.compile(rf'{_QUOTED}|[{{}}()\[\]"]', re.DOTALL)
_BRACE = re.compile(rf'{_QUOTED}|[{{}}"]', re.DOTALL)
_DICTIONARY = r"\{(?:INNER)*+\}"  # nests deeper than the dictionaries of XLA's backends
for _ in range(8):
    _DICTIONARY = _DICTIONARY.replace("INNER", rf'[^{{}}"]++|{_QUOTED}|\{{(?:INNER)*+\}}')
_DICTIONARY_AT = re.compile(_DICTIONARY.replace("INNER", rf'[^{{}}"]++|{_QUOTED}'), re.DOTALL)
_SPACES = re.compile(r"\s*")
_CLOSING = {"{": "}", "(": ")", "[": "]"}
_WORD = re.compile(r"[^\s\"{}()\[\],]+")
# A value may continue after its first bracket: <=[8], T(1,0), a shape's layout, the axes of
# mesh['a'=4] {'a'} and its device ids.
_MORE = re.compile(r"\s*<=\s*(?=\[)|\s*T(?=\()|(?=[\[{(])")
_MESH_MORE = re.compile(r"\s*,\s*device_ids=\s*(?=\()|\s*(?:,\s*)?(?=\{)")

# The only comment that XLA prints is ", /*index=5*/". Its parser takes others too, even inside a
# parameter's number.
_PRINTED_COMMENT = ", /*index="
_BEGINS_COMMENT = re.compile(r"/[/*]")
# The text up to the first comment outside of strings; a kernel's bytecode in base64 contains //.
_WITHOUT_COMMENTS = re.compile(r'(?:[^"/]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"|/(?![/*]))*+', re.DOTALL)
_COMMENT = re.compile(rf"({_QUOTED})|/\*(?:[^*]|\*(?!/))*\*/|//[^\n]*", re.DOTALL)


def syntax_error(text: str, offset: int, message: str) -> errors.HloSyntaxError:
    """Return the error for a place in the text, with its line and column."""
    offset = min(offset, len(text))
    line = text.count("\n", 0, offset) + 1
    start = text.rfind("\n", 0, offset) + 1
    stop = text.find("\n", offset)
    return errors.HloSyntaxError(
        message,
        line=line,
        column=offset - start + 1,
        text_line=text[start : stop if stop >= 0 else len(text)],
    )


def blanked(text: str) -> str:
    """Return the text with spaces in place of comments, so that no offset changes."""
    # From fast to slow: first blank the comments that XLA prints. If other comments seem to begin,
    # check whether they are all inside strings. If not, replace comments one by one.
    begin, *rest = text.split(_PRINTED_COMMENT)
    pieces = [begin]
    for piece in rest:
        end = piece.find("*/")
        if piece[: max(end, 0)].isdecimal():
            pieces += [", ", " " * (len(_PRINTED_COMMENT) + end), piece[end + 2 :]]
        else:
            pieces += [_PRINTED_COMMENT, piece]
    printed = "".join(pieces)
    if not _BEGINS_COMMENT.search(printed):
        return printed
    if "\\" not in printed or '\\"' not in printed:  # each quote begins or ends a string
        pieces = printed.split('"')
        if len(pieces) % 2 and not _BEGINS_COMMENT.search('"'.join(pieces[::2])):
            return printed
    plain = _WITHOUT_COMMENTS.match(printed)
    if plain and plain.end() == len(printed):
        return printed
    # Start again from the given text: what looks like a printed comment may end another comment.
    return _COMMENT.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)


def skip(text: str, position: int, end: int = sys.maxsize) -> int:
    """Return the first position that is not a space."""
    match = _SPACES.match(text, position, end)
    return match.end() if match else position


def match_bracket(text: str, start: int, end: int) -> int:
    """Return the end of the bracket that opens at ``start``; raise an error if it never closes."""
    open_at: list[int] = []
    position = start
    while True:
        match = _BRACKET.search(text, position, end)
        if not match:
            raise syntax_error(text, start, f"this {text[start]!r} is never closed")
        token = match[0]
        position = match.end()
        if token in _CLOSING:
            open_at.append(match.start())
        elif token in "})]":
            opening = open_at.pop()
            if _CLOSING[text[opening]] != token:
                raise syntax_error(text, opening, f"this {text[opening]!r} is never closed")
            if not open_at:
                return position
        elif token == '"':
            raise syntax_error(text, match.start(), "this quote is never closed")


def _dictionary_end(text: str, start: int, end: int) -> int:
    """Return the end of a JSON dictionary as XLA finds it, by counting only ``{`` and ``}``."""
    printed = _DICTIONARY_AT.match(text, start, end)
    if printed:
        return printed.end()
    depth = 0
    for match in _BRACE.finditer(text, start, end):
        depth += (match[0] == "{") - (match[0] == "}")
        if not depth:
            return match.end()
    raise syntax_error(text, start, "this '{' is never closed")


def value_end(text: str, key: str, start: int, end: int) -> int:
    """Return the end of an attribute's value; raise an error if it has none."""
    # A value is a string, text in braces, a word, or a bracket. Brackets may follow a word, and
    # more brackets may follow these, such as a layout or T(1,0).
    first = text[start : start + 1]
    if first == '"':
        quoted = _BRACKET.match(text, start, end)
        if not quoted or quoted[0] == '"':
            raise syntax_error(text, start, "this quote is never closed")
        return quoted.end()
    if first == "{":
        close = _dictionary_end if key == "backend_config" else match_bracket
        return close(text, start, end)
    position = start
    word = _WORD.match(text, position, end)
    if word:
        position = word.end()
    elif not first or first not in "[(":
        raise syntax_error(text, start, f"attribute {key!r} has no value")
    more = _MESH_MORE if word and "mesh" in word[0] else _MORE
    if position < end and text[position] in "[({":
        position = match_bracket(text, position, end)
        while True:
            follows = more.match(text, position, end)
            if not follows or follows.end() >= end:
                break
            position = match_bracket(text, follows.end(), end)
            if more is _MESH_MORE and text[position - 1] == "}":
                break
    if key == "literal" and first != "(":  # a shape, followed by its elements
        return value_end(text, "", skip(text, position, end), end)
    return position


def iter_attributes(text: str, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Yield ``(key, value_start, value_end)`` for ``, key=value, key=value``."""
    position = start
    while position < end:
        printed = PRINTED.match(text, position, end)
        if printed:
            key, (value, position) = printed[1], printed.span(2)
            yield key, value, position
            continue
        position = skip(text, position, end)
        if position >= end or text[position] != ",":
            return
        position = skip(text, position + 1, end)
        key = _KEY.match(text, position, end)
        if not key:
            raise syntax_error(text, position, "expected an attribute, 'key=value'")
        value = skip(text, key.end(), end)
        position = value_end(text, key[1], value, end)
        yield key[1], value, position
