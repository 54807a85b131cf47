"""The door to JAX's interpreter of TPU kernels, which finds what no audit can.

It simulates memories, and looks for races, reads out of bounds, and reads before a write (JAX 0.8.3
to 0.12).
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from shardrules.errors import UnsupportedJaxError

_MODULE = "jax._src.pallas.mosaic.interpret.interpret_pallas_call"


class Races(NamedTuple):
    """The data races that one run of the interpreter found."""

    states: list[Any]  # JAX's records, one for each kernel that ran
    printed: io.StringIO  # what it printed of them

    @property
    def found(self) -> bool:
        """Whether two accesses of one memory were unordered."""
        return any(state.races_found for state in self.states)

    def __str__(self) -> str:
        text = self.printed.getvalue()
        return text[text.find("RACE DETECTED") :].strip()[:1000]


@contextlib.contextmanager
def interpreted(fill: Literal["nan", "zero"]) -> Iterator[Races]:
    """Run the Pallas kernels that are traced inside the ``with`` in JAX's TPU interpreter."""
    try:
        from jax.experimental.pallas import tpu as pltpu

        module: Any = importlib.import_module(_MODULE)
        params = pltpu.InterpretParams(
            detect_races=True, uninitialized_memory=fill, out_of_bounds_reads="raise"
        )
        original = module.RaceDetectionState
        forced = pltpu.force_tpu_interpret_mode(params)
        reset = pltpu.reset_tpu_interpret_mode_state
    except (ImportError, AttributeError, TypeError) as error:
        raise UnsupportedJaxError(
            f"this JAX can't look for races and uninitialised memory in a kernel ({error}); "
            "run the test on JAX 0.8.3 or later"
        ) from error
    states: list = []

    def recording(*args, **kwargs):  # each kernel's state takes the place of the one before
        states.append(original(*args, **kwargs))
        return states[-1]

    printed = io.StringIO()
    module.RaceDetectionState = recording
    try:
        with forced, contextlib.redirect_stdout(printed):
            yield Races(states, printed)
    finally:
        module.RaceDetectionState = original
        reset()
