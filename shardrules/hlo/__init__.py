"""Reads compiled HLO text and judges its collectives. Runs without JAX."""

from shardrules.hlo.collectives import Collective
from shardrules.hlo.module import Computation
from shardrules.hlo.module import Frame
from shardrules.hlo.module import Instruction
from shardrules.hlo.module import Metadata
from shardrules.hlo.module import Module
from shardrules.hlo.module import Shape
from shardrules.hlo.parser import parse
from shardrules.hlo.states import Blocker
from shardrules.hlo.states import Support
from shardrules.hlo.verdict import Judgement
from shardrules.hlo.verdict import judge
from shardrules.hlo.verdict import Output
from shardrules.hlo.verdict import Range
from shardrules.hlo.verdict import Verdict
from shardrules.hlo.verdict import VERDICTS

__all__ = ["Blocker", "Collective", "Computation", "Frame", "Instruction", "Judgement",
           "Metadata", "Module", "Output", "Range", "Shape", "Support", "VERDICTS", "Verdict",
           "judge", "parse"]
