"""Run kernels in JAX's TPU interpreter, which finds errors that no audit can.

It simulates memories, and detects races, reads out of bounds, and reads of uninitialized memory
(JAX 0.8.3 to 0.12).
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from typing import Any, Literal

from shardrules.errors import UnsupportedJaxError

_MODULE = "jax._src.pallas.mosaic.interpret.interpret_pallas_call"
_RACE = "RACE DETECTED"


@contextlib.contextmanager
def interpreted(fill: Literal["nan", "zero"]) -> Iterator[Callable[[str], str]]:
    """Run the Pallas kernels that are traced inside the ``with`` in JAX's TPU interpreter.

    Yields a function that returns JAX's report of a race, empty if there was none. Pass it the text
    of an error that the kernels raised: JAX 0.12 raises the report, earlier versions print it.
    """
    try:
        from jax.experimental.pallas import tpu as pltpu

        module: Any = importlib.import_module(_MODULE)
        params = pltpu.InterpretParams(
            detect_races=True, uninitialized_memory=fill, out_of_bounds_reads="raise"
        )
        original = module.RaceDetectionState
        forced = pltpu.force_tpu_interpret_mode(params)
        reset: Callable[[], None] = pltpu.reset_tpu_interpret_mode_state
    except (ImportError, AttributeError, TypeError) as error:
        raise UnsupportedJaxError(
            f"this JAX can't look for races and uninitialised memory in a kernel ({error}); "
            "run the test on JAX 0.8.3 or later"
        ) from error
    states: list[Any] = []
    printed = io.StringIO()

    def recording(
        *args: Any, **kwargs: Any
    ) -> Any:  # JAX makes a new state for each kernel, so keep all of them
        states.append(original(*args, **kwargs))
        return states[-1]

    def races(raised: str = "") -> str:
        text = printed.getvalue() + raised
        _, race, rest = text.partition(_RACE)
        if not race and not any(state.races_found for state in states):
            return ""
        return (race + rest).strip()[:1000] or "JAX does not say more about it"

    module.RaceDetectionState = recording
    try:
        with forced, contextlib.redirect_stdout(printed):
            yield races
    finally:
        module.RaceDetectionState = original
        reset()
