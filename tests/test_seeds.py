"""Seeds in processes of their own: as in one process, and past those that end theirs."""

import pytest
import seeds
from hlo import fuzz


@pytest.mark.slow
def test_processes_count_as_one_does():
    here = dict(enumerate(seeds.in_this_process("hlo.oracle", range(2))))
    assert seeds.outcomes("hlo.oracle", 2, processes=2) == here


KIND = """
import os, signal, time

def outcome(seed):
    if seed == 7:
        os.kill(os.getpid(), signal.SIGFPE)
    if seed == 9:
        time.sleep(60)
    return {"note": "said"} if seed == 8 else {"seed": seed}
"""


@pytest.mark.slow
def test_a_seed_that_ends_its_process_is_lost_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "kind.py").write_text(KIND)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(seeds, "LIMIT_S", 3)
    results = seeds.outcomes("kind", 7, first=5, processes=2)
    assert list(results) == list(range(5, 12))
    assert results[7] == {"lost": -8, "note": "its process ended with exit code -8"}
    assert results[9] == {"lost": -9, "note": "did not end in 3 s, exit code -9"}
    assert results[8] == {"note": "said"}
    assert all(results[seed] == {"seed": seed} for seed in (5, 6, 10, 11))
    assert "seed 8: said" in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed", [[], ["programms"], ["oracle", "many"], ["oracle", "1", "2", "3", "4"]]
)
def test_what_is_typed_wrongly_is_answered_with_the_kinds(typed, capsys):
    assert seeds.main(typed) == 2
    assert (
        "The kinds are oracle, modules, fuzz, programs, unchecked, moves."
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("hlo.oracle", {"equal": 9, "narrow": 9, "proven": 9, "wrong": ["output 1"]}),
        ("hlo.oracle", {"equal": 9, "narrow": 9, "proven": 5, "wrong": []}),
        ("hlo.oracle", {"lost": -8}),
        ("hlo.fuzz", {"note": "took more than 1 s"}),
        ("sweeps.programs", {"what": "wrong"}),
        ("sweeps.programs", {"lost": 1}),
        ("sweeps.unchecked", {"note": "different: ..."}),
    ],
)
def test_what_is_wrong_fails_the_run(kind, wrong, monkeypatch):
    monkeypatch.setattr(seeds, "outcomes", lambda *args: {0: wrong})
    monkeypatch.setitem(seeds.KINDS, "oracle", kind)
    assert seeds.main(["oracle"]) == 1


def test_what_is_right_does_not(monkeypatch, capsys):
    monkeypatch.setattr(seeds, "outcomes", lambda *args: dict.fromkeys(range(args[1]), {}))
    assert seeds.main(["fuzz", "3"]) == 0
    assert capsys.readouterr().out == f"{fuzz.summary({0: {}, 1: {}, 2: {}})[0]}\n"
