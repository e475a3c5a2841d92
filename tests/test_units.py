"""Bytes meet text in one place: what is printed can be read back, and a doubtful size is refused in words."""

from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpart.errors import OptionError
from seqpart.units import format_limit, format_size, parse_size

FACTORS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@given(st.integers(1, 10**15))
def test_an_int_and_its_digits_are_bytes(size):
    assert parse_size(size) == parse_size(str(size)) == parse_size(f"{size}B") == size


@given(st.integers(1, 10**6), st.sampled_from(sorted(FACTORS)), st.booleans(), st.sampled_from(["", " ", "  "]))
def test_a_unit_multiplies_whatever_its_case_and_spacing(number, unit, lower, space):
    text = f"{space}{number}{space}{unit.lower() if lower else unit}{space}"
    assert parse_size(text) == number * FACTORS[unit]


@given(st.integers(0, 999), st.text("0123456789", min_size=1, max_size=12), st.sampled_from(sorted(FACTORS)))
def test_a_fraction_is_scaled_exactly_and_never_rounded_up(whole, digits, unit):
    expected = int(Fraction(f"{whole}.{digits}") * FACTORS[unit])
    text = f"{whole}.{digits}{unit}"
    if expected:
        assert parse_size(text) == expected
    else:
        with pytest.raises(OptionError, match="above zero"):
            parse_size(text)


def test_gb_is_decimal_gib_is_binary_and_a_tenth_is_exact():
    assert parse_size("2GB") == 2_000_000_000
    assert parse_size("1.5GiB") == 3 * 2**29
    assert parse_size("0.1GB") == 100_000_000
    assert parse_size(".5MB") == 500_000


def test_a_number_with_a_point_is_a_share_of_the_device():
    assert parse_size("0.8", total=1000) == parse_size(0.8, total=1000) == 800
    assert parse_size("1.0", total=1000) == parse_size(1.0, total=1000) == 1000


@pytest.mark.parametrize("share", ["1.5", "0.0", 2.5])
def test_a_share_outside_zero_to_one_is_refused(share):
    with pytest.raises(OptionError, match=r"above 0 and up to 1\.0"):
        parse_size(share, total=1000)


def test_a_share_of_something_unknown_is_refused_with_a_cure():
    with pytest.raises(OptionError, match=r"no meaning here\. Give a size such as 2GB"):
        parse_size("0.5")


def test_auto_is_what_is_free_and_is_refused_where_that_is_unknown():
    assert parse_size("auto", free=123) == parse_size(" AUTO ", free=123) == 123
    with pytest.raises(OptionError, match="'auto' has no meaning here"):
        parse_size("auto")


@pytest.mark.parametrize("text", ["", "GB", "2XB", "two", "-1GB", "1 2GB", "2GB!", "1e9", "nan", "inf", True, None])
def test_anything_else_is_refused_with_what_was_found(text):
    with pytest.raises(OptionError, match="mem_limit: expected a size such as 2GB"):
        parse_size(text, name="--mem-limit")


@pytest.mark.parametrize("size", [0, -1, "0", "0GB"])
def test_a_size_of_nothing_is_refused(size):
    with pytest.raises(OptionError, match="above zero"):
        parse_size(size)


@given(st.text(max_size=12))
def test_no_text_gets_past_the_parser_but_a_size_or_an_option_error(text):
    with suppress(OptionError):
        assert parse_size(text, total=1000, free=1000) >= 0


@given(st.integers(1, 10**14))
def test_a_printed_size_reads_back_within_half_of_its_last_digit(size):
    number, unit = format_size(size).split()
    places = len(number.partition(".")[2])
    # The tolerance is the printed precision itself: half a unit in the last place.
    assert abs(Fraction(number) * FACTORS[unit] - size) <= Fraction(FACTORS[unit], 2 * 10**places)


def test_sizes_print_in_decimal_units():
    assert [format_size(n) for n in (96, 1500, 312_400_000, 1_940_000_000)] == ["96 B", "1.5 KB", "312.4 MB", "1.94 GB"]


@given(st.integers(1, 10**13))
def test_a_printed_limit_is_the_least_whole_megabyte_that_is_not_under(size):
    limit = parse_size(format_limit(size))
    assert limit - 10**6 < size <= limit
