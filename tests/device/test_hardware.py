"""A card that is not here is described by a table: no number above what its parts can do, none without a source, and a
table of one's own is either understood or refused in words.
"""

import dataclasses
import json
import os
import tomllib
from contextlib import suppress
from importlib import resources
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpart
from seqpart.device.card import Hardware, load, names
from seqpart.errors import OptionError
from seqpart.profile.machine import speeds_of

PEAKS = {  # GB by its name, TFLOP/s in float32 and bfloat16, GB/s of its memory, GB/s of PCIe a direction
    "a100-80gb": (80, 19.5, 312.0, 2039, 31.5),
    "h100": (80, 67.0, 989.5, 3350, 63.0),
    "rtx3060-12gb": (12, 12.74, 25.5, 360, 31.5),
    "rtx4060-laptop-8gb": (8, 14.56, 29.1, 256, 15.75),
    "rtx4070-12gb": (12, 29.15, 58.3, 504.2, 31.5),
    "rtx4080-16gb": (16, 48.74, 97.5, 716.8, 31.5),
    "rtx4090": (24, 82.58, 165.2, 1008, 31.5),
}
"""What vendors promise, written down apart from the tables."""
FIELDS = [field.name for field in dataclasses.fields(Hardware)]
OURS = resources.files("seqpart.device").joinpath("cards", "rtx3060-12gb.toml").read_text(encoding="utf-8")
NO_SOURCES = OURS.partition("\n[sources]\n")[0]


@pytest.fixture
def mine(tmp_path):
    """A function that writes a table of one's own and loads it."""

    def write_and_load(text):
        path = tmp_path / "mine.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load(str(path))

    return write_and_load


def changed(name, value):
    """A bundled table's text with `value`, as TOML has it, for a key."""
    lines = [f"{name} = {value}" if line.startswith(f"{name} =") else line for line in NO_SOURCES.splitlines()]
    assert f"{name} = {value}" in lines
    return "\n".join(lines)


# --- The tables that come with seqpart -------------------------------------------------------------------------------


def test_the_names_are_those_of_the_cards_that_are_described():
    assert names() == tuple(sorted(PEAKS))


@pytest.mark.parametrize("name", PEAKS)
def test_a_card_reaches_much_of_its_peaks_and_never_more(name):
    found = load(name)
    _, float32, bfloat16, memory_bandwidth, _ = PEAKS[name]
    assert 0.5 * float32 < found.flops["float32"] / 1e12 < float32
    assert 0.7 * bfloat16 < found.flops["bfloat16"] / 1e12 < bfloat16
    assert 0.75 * memory_bandwidth < found.memory_bandwidth / 1e9 < 0.95 * memory_bandwidth


@pytest.mark.parametrize("name", PEAKS)
def test_copies_are_slower_than_the_slot_and_faster_than_the_disk(name):
    found = load(name)
    for copy in (found.h2d, found.d2h):
        assert 0.7 * PEAKS[name][4] < copy / 1e9 < PEAKS[name][4]
        assert copy > found.disk_read > found.disk_write
    assert found.memory_bandwidth > 10 * found.h2d


@pytest.mark.parametrize("name", PEAKS)
def test_the_driver_offers_a_little_less_than_the_box_says_and_a_context_takes_some_of_it(name):
    found, on_the_box = load(name), PEAKS[name][0] * 2**30
    assert 0.95 * on_the_box < found.memory < on_the_box
    assert 250e6 < found.context < 600e6


@pytest.mark.parametrize("name", PEAKS)
def test_a_launch_and_a_small_copy_take_microseconds(name):
    found = load(name)
    assert 1e-6 < found.launch <= found.copy_latency < 1e-4


@pytest.mark.parametrize("name", PEAKS)
def test_every_number_of_a_bundled_table_has_a_source(name):
    assert set(load(name).sources) == set(FIELDS) - {"name", "sources"}


@pytest.mark.parametrize("name", PEAKS)
def test_a_bundled_table_is_one_of_ones_own_too(name):
    with resources.as_file(resources.files("seqpart.device") / "cards" / f"{name}.toml") as path:
        assert load(str(path)) == load(name)


def test_every_installation_has_the_tables():
    root = Path(seqpart.__file__).parent
    setuptools = tomllib.loads((root.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    shipped = {path for pattern in setuptools["package-data"]["seqpart"] for path in root.glob(pattern)}
    assert {root / "device" / "cards" / f"{name}.toml" for name in names()} <= shipped


def test_a_fused_adam_moves_seven_numbers_of_four_bytes_for_each_parameter():
    assert load("rtx4090").optimizer == load("rtx4090").memory_bandwidth / (7 * 4)


# --- A table of one's own --------------------------------------------------------------------------------------------


def test_sources_may_be_left_out(mine):
    assert mine(NO_SOURCES) == dataclasses.replace(load("rtx3060-12gb"), sources={})


def test_a_number_of_bytes_is_a_size_too(mine):
    assert mine(changed("memory", 12 * 10**9)).memory == mine(changed("memory", '"12GB"')).memory == 12 * 10**9


def test_a_whole_number_is_a_rate_too(mine):
    assert mine(changed("h2d", 25_000_000_000)).h2d == 25e9


@pytest.mark.parametrize("name", ["rtx9090", "", "RTX4090", "rtx4090.tom", "\0", "x" * 5000])
def test_an_unknown_card_is_answered_with_those_that_are_known(name):
    with pytest.raises(OptionError) as raised:
        load(name)
    assert "h100, rtx3060-12gb, rtx4060-laptop-8gb, rtx4070-12gb" in str(raised.value)
    assert "or the path of a .toml file of that form; found '" in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_file_that_is_not_there_is_answered_with_the_cards_that_need_none(tmp_path):
    with pytest.raises(OptionError, match=r"cannot read .*no\.toml: No such file or directory\. The cards .* are a100-80gb,"):
        load(str(tmp_path / "no.toml"))


def test_what_cannot_be_read_as_text_is_refused_at_once(tmp_path, mine):
    (tmp_path / "folder.toml").mkdir()
    os.mkfifo(tmp_path / "pipe.toml")
    for name, reason in {"folder": "it is a directory", "pipe": "it is no regular file"}.items():
        with pytest.raises(OptionError, match=reason):
            load(str(tmp_path / f"{name}.toml"))
    with pytest.raises(OptionError, match=r"is not TOML: it is no text in UTF-8\."):
        mine(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="no file can be called"):
        load("zero\0byte.toml")
    with pytest.raises(OptionError, match="File name too long"):
        load(f"{'x' * 5000}.toml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_of_somebody_else_is_refused_in_words(tmp_path):
    path = tmp_path / "secret.toml"
    path.write_text(OURS)
    path.chmod(0)
    with pytest.raises(OptionError, match="Permission denied"):
        load(str(path))


NOT_TOML = ["memory", "[", "memory = 1\nmemory = 2", "memory = 'x", f"memory = {'9' * 5000}", "a = " + "[" * 5000]


@pytest.mark.parametrize("text", NOT_TOML, ids=range(len(NOT_TOML)))
def test_what_is_not_toml_is_refused(mine, text):
    with pytest.raises(OptionError, match="is not TOML"):
        mine(text)


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("flops", "sources", "host_bandwidth")])
def test_a_missing_field_is_named(mine, name):
    with pytest.raises(OptionError, match=rf"mine\.toml has no {name}\. Its keys are name, memory, context, flops, "):
        mine("\n".join(line for line in NO_SOURCES.splitlines() if not line.startswith(f"{name} =")))


def test_all_keys_that_are_missing_or_unknown_are_named_at_once(mine):
    text = NO_SOURCES.replace("launch =", "lunch =").replace("h2d =", "H2D =").replace("float32 =", "fp32 =")
    with pytest.raises(OptionError, match=r"has no h2d, launch and has unknown 'H2D', 'lunch'\."):
        mine(text)
    with pytest.raises(
        OptionError, match=r"flops has no float32 and has unknown 'fp32'\. Its keys are float32, bfloat16, tf32\."
    ):
        mine(text.replace("lunch", "launch").replace("H2D", "h2d"))


def test_what_a_table_need_not_have_is_assumed(mine):
    text = "\n".join(line for line in NO_SOURCES.splitlines() if not line.startswith(("host_bandwidth", "tf32")))
    found = mine(text)
    assert (found.host_bandwidth, found.flops["tf32"]) == (40e9, found.flops["bfloat16"] / 2)


def test_products_are_priced_at_the_rate_of_their_type():
    card = load("rtx4090")
    assert speeds_of(card).flops == card.flops["float32"]
    assert speeds_of(card, torch.bfloat16).flops == card.flops["bfloat16"]
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, "tf32"
    try:
        assert speeds_of(card).flops == card.flops["bfloat16"] / 2
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_an_empty_table_lacks_everything_but_sources(mine):
    with pytest.raises(
        OptionError, match="has no name, memory, context, flops, memory_bandwidth, h2d, d2h, copy_latency, launch"
    ):
        mine("")


def test_a_source_of_what_is_no_field_is_refused(mine):
    with pytest.raises(OptionError, match=r"sources has unknown 'pcie'\."):
        mine(f'{NO_SOURCES}\n[sources]\npcie = "I guess"')


WRONG = [
    *(("name", value, "expected a text in quotes; found") for value in ("1", "''", "' '", "[]")),
    *(("memory", value, 'expected a size in quotes such as "12GB"') for value in ("12e9", "true", "[1]", "nan", "1979-05-27")),
    *(("memory", value, "expected a size such as 2GB") for value in ("'12 apples'", "''", "'12e9'")),
    *(("memory", value, "expected a size above zero") for value in ("0", "-1", "'0GB'")),
    ("memory", "'0.5'", "a share such as 0.5 has no meaning here"),
    ("memory", "'99999999TB'", "expected at most"),
    ("context", "'12GiB'", "expected less than the card's memory, 12.49 GB; found 12.88 GB."),
    *(
        (rate, value, "per second, from 1e6 to 1e21, such as 25e9; found")
        for rate in ("memory_bandwidth", "h2d", "d2h", "disk_read", "disk_write", "float32", "bfloat16")
        for value in ("0", "-25e9", "25", "'25 GB/s'", "true", "nan", "inf", "1e300", "9" * 400, "[25e9]", "0x" + "f" * 9999)
    ),
    *(
        (time, value, "expected seconds, above 0 and up to 1, such as 5e-6; found")
        for time in ("copy_latency", "launch")
        for value in ("0", "0.0", "-5e-6", "5", "'5us'", "false", "nan", "inf", "{}")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "says"), WRONG, ids=range(len(WRONG)))
def test_a_value_that_is_none_is_refused_with_its_field_and_what_was_found(mine, name, value, says):
    with pytest.raises(OptionError) as raised:
        mine(changed(name, value))
    assert f"{name}: " in str(raised.value)
    assert says in str(raised.value)
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize("name", ["flops", "sources"])
def test_a_value_in_the_place_of_a_table_is_refused(mine, name):
    text = NO_SOURCES if name == "sources" else NO_SOURCES.partition("\n[flops]\n")[0]
    with pytest.raises(OptionError, match=rf"{name}: expected a table, \[{name}\]; found 1\."):
        mine(f"{name} = 1\n{text}")


# --- Any table -------------------------------------------------------------------------------------------------------

RATES = st.floats(1e6, 1e21)
TIMES = st.floats(0, 1, exclude_min=True)
WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30).filter(str.strip)
CARDS = st.builds(
    Hardware,
    name=WORDS,
    memory=st.integers(2, 10**15),
    context=st.just(1),
    flops=st.fixed_dictionaries({"float32": RATES, "bfloat16": RATES, "tf32": RATES}),
    sources=st.dictionaries(st.sampled_from(FIELDS), WORDS, max_size=4),
    **dict.fromkeys(("memory_bandwidth", "h2d", "d2h", "disk_read", "disk_write"), RATES),
    **dict.fromkeys(("copy_latency", "launch"), TIMES),
)


def written(card):
    """A card as TOML: JSON's texts and numbers are TOML's."""
    values = dataclasses.asdict(card)
    tables = {name: values.pop(name) for name in ("flops", "sources")}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    for table, entries in tables.items():
        lines += [f"[{table}]", *(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in entries.items())]
    return "\n".join(lines)


@given(card=CARDS)
def test_any_card_that_is_written_down_is_read_back(tmp_path_factory, card):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(written(card), encoding="utf-8")
    assert load(str(path)) == card


@given(
    at=st.integers(0, len(OURS)),
    length=st.integers(0, 20),
    put=st.text(max_size=8)
    | st.sampled_from(["nan", "inf", "true", "{}", "[]", "\n[flops]\n", "-", "0", "9" * 400, "'", '"""']),
)
def test_a_table_that_is_damaged_anywhere_is_read_or_refused_in_words(tmp_path_factory, at, length, put):
    path = tmp_path_factory.getbasetemp() / "damaged.toml"
    path.write_bytes((OURS[:at] + put + OURS[at + length :]).encode(errors="surrogatepass"))
    with suppress(OptionError):
        found = load(str(path))
        assert 0 < found.context < found.memory
        assert min(*found.flops.values(), *(getattr(found, name) for name in FIELDS[4:11])) > 0


@given(text=st.text(max_size=200))
def test_any_text_is_read_or_refused_in_words(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "text.toml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with suppress(OptionError):
        load(str(path))


@given(name=st.text(max_size=30))
def test_any_name_is_known_or_refused_in_words(name):
    with suppress(OptionError):
        assert name in names() or load(name)
