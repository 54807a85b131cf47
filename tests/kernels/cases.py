"""All kernel cases, one for each row of the table of measurements."""

from __future__ import annotations

from kernels import gpu, tpu
from kernels.case import Case

ALL: tuple[Case, ...] = tpu.CASES + gpu.CASES
BY_NAME = {case.name: case for case in ALL}
assert len(BY_NAME) == len(ALL)
