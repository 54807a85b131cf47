"""HLO dumps beside a profile, for programs whose HLO it lacks."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable

from shardrules import hlo
from shardrules.errors import HloError, ProfileError

_FILES = ("*after_optimizations.txt", "*after_optimizations.txt.gz", "*.hlo", "*.hlo.gz")
_NUMBER = re.compile(r"module_0*(\d+)\.")  # XLA's number of the module; on CPU the program's id
_FRAME = re.compile(r" stack_frame_id=\d+")  # in tables that each copy of a text has anew


def body(text: str) -> str:
    """Return a module's computations, without pointers to its tables of source lines."""
    # One step compiled twice, for the first call and for the others, differs in these alone.
    return _FRAME.sub("", text[max(text.find("\n%"), 0) :])


class Dumps:
    """The modules that files hold, with XLA's number of each."""

    def __init__(self, modules: Iterable[tuple[int | None, hlo.Module]], where: str):
        self.where = where
        self._modules = list(modules)

    @classmethod
    def of_folder(cls, folder: pathlib.Path) -> Dumps:
        from shardrules import program

        if not folder.is_dir():
            raise ProfileError(f"--hlo {folder} is not a folder")
        files = sorted({file for pattern in _FILES for file in folder.glob(pattern)})
        if not files:
            raise ProfileError(
                f"--hlo {folder} holds no HLO text ({', '.join(_FILES[::2])}); write it with "
                "XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text'"
            )
        modules = []
        for file in files:
            text = program.read_file(file).text
            try:
                module = hlo.parse(text, name=file.name)
            except HloError:
                continue  # other text
            match = _NUMBER.match(file.name)
            modules.append((int(match[1]) if match else None, module))
        return cls(modules, str(folder))

    def text(self, name: str, number: int, operations: Iterable[str]) -> str | None:
        """Return the text of the one program that has this name and all operations that ran."""
        ran = set(operations)
        fitting = [
            (of_file, module.text)
            for of_file, module in self._modules
            if module.name == name
            and ran <= {i.name for c in module.computations.values() for i in c.instructions}
        ]
        numbered = [text for of_file, text in fitting if of_file == number]
        texts = numbered or [text for _, text in fitting]
        if len({body(text) for text in texts}) > 1:
            raise ProfileError(
                f"{self.where} holds {len(texts)} programs {name} with the operations that ran; "
                "leave one of them there, or dump the process that was profiled"
            )
        return texts[0] if texts else None
