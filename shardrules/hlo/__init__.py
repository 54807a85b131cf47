"""Read compiled HLO text and judge its collectives, without JAX."""

from shardrules.hlo.known.states import Blocker, Support
from shardrules.hlo.proof.judgement import VERDICTS, Collective, Judgement, Output, Range, Verdict
from shardrules.hlo.proof.verdict import judge
from shardrules.hlo.reader.module import Computation, Frame, Instruction, Metadata, Module, Shape
from shardrules.hlo.reader.parser import parse

__all__ = [
    "VERDICTS",
    "Blocker",
    "Collective",
    "Computation",
    "Frame",
    "Instruction",
    "Judgement",
    "Metadata",
    "Module",
    "Output",
    "Range",
    "Shape",
    "Support",
    "Verdict",
    "judge",
    "parse",
]
