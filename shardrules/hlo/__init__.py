"""Reads compiled HLO text and judges its collectives. Runs without JAX."""

from shardrules.hlo.proof.collectives import Collective
from shardrules.hlo.reader.module import Computation
from shardrules.hlo.reader.module import Frame
from shardrules.hlo.reader.module import Instruction
from shardrules.hlo.reader.module import Metadata
from shardrules.hlo.reader.module import Module
from shardrules.hlo.reader.module import Shape
from shardrules.hlo.reader.parser import parse
from shardrules.hlo.known.states import Blocker
from shardrules.hlo.known.states import Support
from shardrules.hlo.proof.verdict import Judgement
from shardrules.hlo.proof.verdict import judge
from shardrules.hlo.proof.verdict import Output
from shardrules.hlo.proof.verdict import Range
from shardrules.hlo.proof.verdict import Verdict
from shardrules.hlo.proof.verdict import VERDICTS

__all__ = ["Blocker", "Collective", "Computation", "Frame", "Instruction", "Judgement",
           "Metadata", "Module", "Output", "Range", "Shape", "Support", "VERDICTS", "Verdict",
           "judge", "parse"]
