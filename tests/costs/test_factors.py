"""An array's dimensions as factors: held to what numpy says of the same memory."""

import numpy as np
import pytest

from shardrules import hlo
from shardrules.costs.waste import factors
from shardrules.hlo.reader import flow, shapes


def in_memory(array, order, tile):
    """Lay an array out as XLA does: its dimensions in an order, the last two in padded tiles."""
    array = array.transpose(order)
    if tile:
        pads = [(0, -size % t) for size, t in zip(array.shape[-2:], tile)]
        array = np.pad(array, [(0, 0)] * (array.ndim - 2) + pads, constant_values=-1)
        rows, lanes = (size // t for size, t in zip(array.shape[-2:], tile))
        array = array.reshape(*array.shape[:-2], rows, tile[0], lanes, tile[1])
        array = np.moveaxis(array, -3, -2)
    return array.ravel()


def random_array(rng, primes, least):
    """Give an array's sizes and the order of its dimensions, and the same as XLA writes it."""
    sizes = [1] * int(rng.integers(least, 5))
    for prime in primes:
        sizes[rng.integers(len(sizes))] *= prime
    order = [int(d) for d in rng.permutation(len(sizes))]
    return tuple(sizes), order


def shape(sizes, order, tile):
    layout = ",".join(map(str, reversed(order)))
    return hlo.Shape("f32", sizes, layout + (f":T({tile[0]},{tile[1]})S(1)" if tile else ""))


def indices(read, sizes, rank):
    """Give the index in each first dimension that factors give to each element."""
    found = np.zeros((rank, *sizes), int)
    for places, dimension in zip(np.indices(sizes), read):
        for origin, stride, size in reversed(dimension):
            found[origin] += places % size * stride
            places = places // size
    return found


@pytest.mark.parametrize("tile, other", [(None, None), ((2, 3),) * 2, ((2, 3), (4, 3))])
def test_the_same_memory_read_as_another_array(tile, other):
    rng, known = np.random.default_rng(0), 0
    for _ in range(2000):
        primes = rng.choice([2, 2, 3], rng.integers(2, 7))
        (sizes, order), (others, other_order) = (
            random_array(rng, primes, 2 if tile else 1) for _ in range(2)
        )
        before, after = shape(sizes, order, tile), shape(others, other_order, other)
        read = factors.read_as(factors.of(sizes), before, after)
        numbers = np.arange(np.prod(sizes))
        memory = in_memory(numbers.reshape(sizes), order, tile)
        places = in_memory(numbers.reshape(others), other_order, other)
        if read is None:
            continue
        known += 1
        assert np.array_equal(memory < 0, places < 0)  # what is padded
        held = np.zeros_like(numbers)
        held[places[places >= 0]] = memory[memory >= 0]
        expected = np.array(np.unravel_index(held.reshape(others), sizes))
        assert np.array_equal(indices(read, others, len(sizes)), expected)
        # Each part of each dimension is in one place, joined where its parts lie together.
        for dimension in read:
            for major, minor in zip(dimension, dimension[1:]):
                assert (major.origin, major.stride) != (minor.origin, minor.stride * minor.size)
    assert known > (40 if tile else 1000)


@pytest.mark.parametrize(
    "before, after, read",
    [
        ("f32[512]{0}", "f32[8,64]{1,0}", [[(0, 64, 8)], [(0, 1, 64)]]),
        ("f32[8,64]{0,1}", "f32[64,8]{1,0}", [[(1, 1, 64)], [(0, 1, 8)]]),
        ("f32[4,6]{1,0}", "f32[6,4]{1,0}", None),  # 3 of 6 and 2 of 4 lie together
        ("f32[512]{0}", "f32[8,64]", None),  # no layout
        ("f32[512]{0}", "s32[512]{0}", None),
        (
            "f32[2,8,256]{2,1,0:T(8,128)}",
            "f32[16,256]{1,0:T(8,128)S(1)}",
            [[(0, 1, 2), (1, 1, 8)], [(2, 1, 256)]],
        ),
        ("f32[2,4,256]{2,1,0:T(8,128)}", "f32[8,256]{1,0:T(8,128)}", None),  # 4 rows of 8
        ("f32[16,256]{1,0:T(8,128)}", "f32[16,2,128]{2,1,0:T(8,128)}", None),
        ("f32[16,256]{1,0:T(8,128)}", "f32[16,256]{1,0:T(4,128)}", None),
        ("f32[16,64]{1,0:T(8,128)}", "f32[16,64]{1,0:T(4,128)}", [[(0, 1, 16)], [(1, 1, 64)]]),
        ("f32[20,64]{1,0:T(8,128)}", "f32[20,64]{1,0:T(4,128)}", None),  # 20 rows of 24
        ("bf16[16,64]{1,0:T(8,128)}", "bf16[16,64]{1,0:T(8,128)(2,1)}", None),
        ("bf16[16,64]{1,0:T(8,128)(2,1)}", "bf16[16,64]{1,0:T(1,128)(2,1)}", None),
        (
            "bf16[16,64]{1,0:T(8,128)(2,1)}",
            "bf16[16,64]{1,0:T(4,128)(2,1)}",
            [[(0, 1, 16)], [(1, 1, 64)]],
        ),
    ],
)
def test_single_arrays(before, after, read):
    one, other = (shapes.read(text, 0)[0] for text in (before, after))
    assert factors.read_as(factors.of(one.dimensions), one, other) == read


@pytest.mark.parametrize("last", ["bitcast(r)", "transpose(r), dimensions={1,0}", "copy(r)"])
def test_behind_a_reshape_the_factors_are_of_another_array(last):
    """XLA for TPU reshapes what it gathers of parts that are no multiple of a tile's rows."""
    order = "0,1" if "bitcast" in last else "1,0"
    module = hlo.parse(f"""\
HloModule m, is_scheduled=true

ENTRY %main (p: f32[8,12,12]) -> f32[96,12] {{
  %p = f32[8,12,12]{{2,1,0}} parameter(0)
  %r = f32[96,12]{{{order}}} reshape(%p)
  ROOT %last = f32[96,12]{{{order}}} {last}
}}
""")
    end = flow.of(module, "main").end
    assert factors.followed(factors.of((8, 12, 12)), end) is None
    assert factors.followed(factors.of((96, 12)), end) is not None
