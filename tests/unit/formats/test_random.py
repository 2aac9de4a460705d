"""Random numbers by seed and place: the published generator, and nothing else that they depend on."""

import platform
import shutil

import pytest
import torch
from format_inputs import normal

from qcollect.formats import random_compiled
from qcollect.formats.c_function import FLAGS, CFunction
from qcollect.formats.catalog import E4M3, QUANT_TYPES
from qcollect.formats.checks import DTYPES
from qcollect.formats.elements import round_to_element_
from qcollect.formats.quantizer import Quantizer, count_saturated, fake_quantize, quantize
from qcollect.formats.random import random_bits, random_fractions, random_signs, seed_of

STOCHASTIC = tuple(name for name, entry in QUANT_TYPES.items() if "stochastic" in entry.roundings)
NUM = 100_000


def rounded(x: torch.Tensor, quant_type: str, seed: int = 1, **settings: object) -> torch.Tensor:
    return fake_quantize(x, quant_type, rounding="stochastic", seed=seed, **settings)


def unit_scale(quant_type: str) -> dict[str, float]:
    """The abs max under which the scale of the tensor is 1, where it has one."""
    entry = QUANT_TYPES[quant_type]
    if not entry.has_tensor_scale:
        return {}
    assert entry.tensor_scale is not None and entry.tensor_scale.bound is not None
    return {"amax": entry.tensor_scale.bound}


# --- the generator ------------------------------------------------------------------------------


def test_first_word_is_that_of_philox() -> None:
    # Random123's known answers: counter and key all zero give 6627e8d5 e169c58d bc57ac4c 9b00dbd8
    assert random_bits(0, torch.tensor([0])).tolist() == [0x6627E8D5]


def test_bits_use_all_of_seed_and_place() -> None:
    places = torch.tensor([0, 1, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 62])
    seeds = [0, 1, 1 << 31, 1 << 32, (1 << 63) - 1]
    words = [word for seed in seeds for word in random_bits(seed, places).tolist()]
    assert len(set(words)) == len(words)
    assert all(0 <= word < 1 << 32 for word in words)


def test_fractions_are_whole_numbers_of_2_to_the_24() -> None:
    fractions = random_fractions(3, NUM)
    assert fractions.dtype == torch.float32
    assert (fractions >= 0).all() and (fractions < 1).all()
    assert torch.equal(fractions * 2**24, (fractions * 2**24).round())
    assert len(fractions.unique()) > NUM * (1 - NUM / 2**25) - 100


@pytest.mark.parametrize("first", [0, 1, 16, 63, 64, 1000, (1 << 38) - 10, (1 << 40) + 7, (1 << 62) + 5])
@pytest.mark.parametrize("num", [0, 1, 15, 63, 64, 65, 1000])
def test_fractions_do_not_depend_on_where_a_part_begins(first: int, num: int) -> None:
    around = random_fractions(9, num + 130, first=max(first - 65, 0))
    start = min(first, 65)
    assert torch.equal(random_fractions(9, num, first=first), around[start : start + num])


@pytest.mark.parametrize(
    ("flags", "wishes"),
    [
        (FLAGS, ("-fopenmp",)),
        (FLAGS, ("-no-such-flag",)),
        ((*FLAGS, "-mno-avx2"), ()),
        ((*FLAGS, "-mno-avx2", "-O0"), ()),
    ],
    ids=str,
)
def test_compiled_fractions_are_those_of_torch(
    flags: tuple[str, ...], wishes: tuple[str, ...], tmp_path, monkeypatch
) -> None:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    if len(flags) > len(FLAGS) and platform.machine() != "x86_64":
        pytest.skip("not a processor with AVX2")
    monkeypatch.setenv("QCOLLECT_CACHE_DIR", str(tmp_path))
    function = random_compiled._FUNCTION
    fresh = CFunction(function.source, function.name, function.argument_types, flags=flags, wishes=wishes)
    monkeypatch.setattr(random_compiled, "_FUNCTION", fresh)
    assert random_compiled.prepare() == (True, "")
    for seed in (0, 1, 12345, (1 << 63) - 1):
        for first in (0, 1, 63, 64, (1 << 32) - 1, (1 << 38) - 70, (1 << 40) + 7, (1 << 62) + 5):
            for num in (0, 1, 64, 65, 1000, 100_003):
                out = torch.full((num + 1,), -1.0)
                random_compiled.fill_fractions(out[:num], seed, first)
                assert torch.equal(out[:num], random_fractions(seed, num, first=first)), (seed, first, num)
                assert out[num] == -1.0


def test_without_a_compiler_fractions_are_those_of_torch(monkeypatch) -> None:
    monkeypatch.setattr(random_compiled._FUNCTION, "call", None)
    out = torch.empty(3, 50)
    assert random_compiled.fill_fractions(out, 7, 11) is not None
    assert torch.equal(out.view(-1), random_fractions(7, 150, first=11))


@pytest.mark.parametrize("seed", [0, 1, 12345, (1 << 63) - 1])
def test_fractions_are_uniform(seed: int) -> None:
    fractions = random_fractions(seed, NUM).double()
    assert abs(fractions.mean().item() - 0.5) < 5 * (1 / 12 / NUM) ** 0.5
    counts = torch.histc(fractions.float(), 100, 0, 1)
    expected = NUM / 100
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_squared < 99 + 5 * (2 * 99) ** 0.5
    for step in (1, 16, 32, 64):  # neighbours, and words of one counter
        together = ((fractions[step:] - 0.5) * (fractions[:-step] - 0.5)).mean().item()
        assert abs(together) < 5 / 12 / NUM**0.5, step


def test_signs_are_balanced_and_belong_to_the_seed() -> None:
    signs = random_signs(1, NUM, torch.device("cpu"))
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(signs.mean().item()) < 5 / NUM**0.5
    assert torch.equal(random_signs(1, NUM, torch.device("cpu")), signs)
    assert not torch.equal(random_signs(2, NUM, torch.device("cpu")), signs)
    assert torch.equal(random_signs(1, 16, torch.device("cpu")), signs[:16])


def test_seeds_are_told_apart_by_every_part() -> None:
    parts = [(1, "a"), ("a", 1), (1, "a", 0), (11, "a"), (1, "1a"), (1, "", "a"), ("1a",), ()]
    seeds = [seed_of(*part) for part in parts]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert seed_of(1, "model.layers.0", 3) == seed_of(1, "model.layers.0", 3)


# --- rounding by it -----------------------------------------------------------------------------


@pytest.mark.parametrize("quant_type", STOCHASTIC)
def test_same_seed_gives_the_same_values_and_another_gives_others(quant_type: str) -> None:
    x = normal(16, 64)
    y = rounded(x, quant_type)
    torch.manual_seed(5)  # of no consequence
    assert torch.equal(rounded(x, quant_type), y)
    assert not torch.equal(rounded(x, quant_type, seed=2), y)
    assert not torch.equal(rounded(x, quant_type, seed=1 << 32), y)
    state = torch.get_rng_state()
    rounded(x, quant_type)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("quant_type", STOCHASTIC)
def test_every_way_of_asking_draws_the_same(quant_type: str) -> None:
    x = normal(7, 70)
    y = rounded(x, quant_type)
    quantizer = Quantizer.create(quant_type, rounding="stochastic")
    amax = quantizer.amax_of(x)
    assert torch.equal(quantizer(x, seed=1)[0], y)
    assert torch.equal(quantizer.apply(x, amax=amax, seed=1), y)
    assert torch.equal(quantizer.quantize(x, seed=1).dequantize(), y)
    assert torch.equal(quantize(x, quant_type, rounding="stochastic", seed=1).dequantize(), y)
    out = x.clone()
    assert torch.equal(rounded(out, quant_type, out=out), y)


@pytest.mark.parametrize("quant_type", STOCHASTIC)
def test_draws_do_not_depend_on_dtype(quant_type: str) -> None:
    x = normal(16, 70).bfloat16()
    for dtype in DTYPES:
        assert torch.equal(rounded(x.to(dtype), quant_type).float(), rounded(x.float(), quant_type).to(dtype).float())


@pytest.mark.parametrize("quant_type", STOCHASTIC)
def test_draws_do_not_depend_on_strides(quant_type: str) -> None:
    base = normal(66, 6, 80)
    for view in (base.transpose(0, 2), base[::2, :, 3:73:2], base[:1, :, :1].expand(40, 6, 40)):
        for axis in (0, 2):
            assert torch.equal(rounded(view, quant_type, axis=axis), rounded(view.contiguous(), quant_type, axis=axis))


@pytest.mark.parametrize("quant_type", STOCHASTIC)
def test_draws_do_not_depend_on_axis_block_or_padding(quant_type: str) -> None:
    """All numbers are alike, so that what is drawn is all that can differ."""
    entry, scale = QUANT_TYPES[quant_type], unit_scale(quant_type)
    x = torch.full((33, 50), 1.3)
    y = rounded(x, quant_type, **scale)
    assert len(set(y.flatten().tolist())) == 2
    assert torch.equal(rounded(x.view(3, 11, 50), quant_type, **scale), y.view(3, 11, 50))
    assert torch.equal(rounded(x.flatten(), quant_type, **scale), y.flatten())
    sizes: list[object] = [None]
    if entry.block_size is not None:
        sizes += [8, 64] if entry.micro_exponents else [5, 64, (7, 9)]
    for size in sizes:
        for axis in (0, 1, -1):
            assert torch.equal(rounded(x, quant_type, axis=axis, block_size=size, **scale), y)


@pytest.mark.parametrize("quant_type", STOCHASTIC)
def test_an_element_draws_by_its_place_in_the_tensor(quant_type: str) -> None:
    """So a longer tensor starts as a shorter one does."""
    x, scale = torch.full((300,), 1.3), unit_scale(quant_type)
    long, short = rounded(x, quant_type, **scale), rounded(x[:100], quant_type, **scale)
    assert torch.equal(long[:100], short)
    assert not torch.equal(long[100:200], short)


@pytest.mark.parametrize("quant_type", STOCHASTIC)
def test_mean_of_many_draws_is_the_number_itself(quant_type: str) -> None:
    """Within five standard errors, for numbers between every kind of neighbours; blocks hold what pins the scale."""
    entry = QUANT_TYPES[quant_type]
    num, values = 4000, (1.0, 1.03, 1.3, -1.77, 0.3, -0.0711, 5.9)
    x = torch.zeros(num, 16)
    x[:, 0], x[:, 8:15] = 6.0, torch.tensor(values)
    settings = {"scale_rule": "rceil"} if "rceil" in entry.scale_rules else {}
    y = rounded(x, quant_type, **settings, **({"block_size": 16} if entry.block_size else {})).double()
    for column, value in enumerate(x[0, 8:15].double(), 8):
        drawn = y[:, column]
        low, high = drawn.min(), drawn.max()
        assert set(drawn.tolist()) <= {low.item(), high.item()}
        assert low <= value <= high
        sigma = ((value - low) * (high - value) / num).sqrt()
        assert (drawn.mean() - value).abs() <= 5 * sigma, value


@pytest.mark.parametrize("quant_type", STOCHASTIC)
def test_numbers_that_are_values_never_move(quant_type: str) -> None:
    arguments = unit_scale(quant_type)
    x = fake_quantize(normal(64, 64), quant_type, **arguments)
    if quant_type in ("hif4", "nvfp4"):  # their block scales are quotients, so only what they leave exact
        x = torch.zeros(64, 64)
        x[:, 0], x[:, 8], x[:, 16] = (7.0, 0.25, 1.0) if quant_type == "hif4" else (6.0, 0.5, 6.0)
    for seed in range(5):
        assert torch.equal(rounded(x, quant_type, seed=seed, **arguments), x)


def test_a_draw_below_the_fraction_goes_up_and_one_equal_to_it_does_not() -> None:
    """So that a draw of zero moves no exact value, and every fraction has the share of draws that is its own."""
    values = torch.tensor([1.0, -1.0, 448.0, 2.0**-9, 0.0, 1.03125, -1.03125, 1.03125, 2.0**-10])
    draws = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.25, 0.25, 0.25 - 2.0**-24, 0.5])
    y = round_to_element_(values, E4M3, "stochastic", random=draws)
    assert y.tolist() == [1.0, -1.0, 448.0, 2.0**-9, 0.0, 1.0, -1.0, 1.125, 0.0]


def test_beyond_the_maximum_is_clamped_whatever_is_drawn() -> None:
    x = torch.full((64, 32), 1.99 * 2.0**9)
    assert set(rounded(x, "mxfp8").flatten().tolist()) == {896.0}
    counted = count_saturated(x, "mxfp8", rounding="stochastic", seed=1)
    assert counted == x.numel()
    x = torch.full((64, 32), 36000.0)  # between the maximum of hifp8 and what its last step would reach
    assert set(rounded(x, "hifp8").flatten().tolist()) == {32768.0, float("inf")}
    assert set(rounded(x, "hifp8", saturate=True).flatten().tolist()) == {32768.0}


def test_small_numbers_go_to_zero_or_to_the_smallest_value_with_their_sign() -> None:
    x = torch.full((64, 32), 2.0**-25)
    assert set(rounded(x, "hifp8").flatten().tolist()) == {0.0, 2.0**-22}
    x = -torch.full((64, 32), 0.1)
    x[:, 0] = 4.0
    y = rounded(x, "mxfp4")[:, 1:]
    assert set(y.flatten().tolist()) == {-0.0, -0.5}
    assert y.signbit().all()
