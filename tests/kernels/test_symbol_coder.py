"""The entropy coder of whole numbers: what it codes comes back, and whatever it gets, it stays within its arrays."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_cnr.kernels import cpu
from torchrec_cnr.kernels.cpu.symbol_coder import ESCAPE, NUM_CLASSES, SCALE_BITS, ZERO_DIGIT, most_words
from torchrec_cnr.quantization.symbol_tables import NUM_SPREADS, NUM_TABLES, class_tables, spreads, symbol_tables

Numbers = npt.NDArray[np.int16]


def some_numbers(random: np.random.Generator, num_rows: int, num_cols: int) -> Numbers:
    """Columns of very different spreads, and now and then a number of any size."""
    spread = 10.0 ** random.uniform(-2, 4, num_cols)
    numbers = np.clip(random.normal(0, spread, (num_rows, num_cols)), -32_768, 32_767).astype(np.int16)
    anywhere = random.random(numbers.shape) < 0.01
    numbers[anywhere] = random.integers(-32_768, 32_768, int(anywhere.sum()))
    return numbers


def even_classes() -> npt.NDArray[np.uint16]:
    return np.full(NUM_CLASSES, (1 << SCALE_BITS) // NUM_CLASSES, np.uint16)


@given(
    num_rows=st.integers(0, 40),
    num_cols=st.integers(1, 200),
    first_class=st.integers(0, 40),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_numbers_come_back(num_rows: int, num_cols: int, first_class: int, seed: int) -> None:
    """Of all sizes, by tables that do not fit them, for any number of rows, and for more columns than a chunk has."""
    random = np.random.default_rng(seed)
    numbers = some_numbers(random, num_rows, num_cols)
    choices = random.integers(0, NUM_TABLES, (NUM_CLASSES, num_cols)).astype(np.uint8)
    tables = class_tables(even_classes())
    states, words = cpu.encode_numbers(numbers, first_class, choices, tables, symbol_tables())
    assert len(words) <= most_words(num_rows, num_cols)
    decoded = np.ones_like(numbers)
    assert cpu.decode_numbers(words, states, choices, tables, symbol_tables(), decoded)
    assert (decoded == numbers).all()


@given(data=st.data(), seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_other_words_are_noticed(data: st.DataObject, seed: int) -> None:
    """Fewer, more or other words, or other states: the result is not called right, and nothing else is touched."""
    random = np.random.default_rng(seed)
    numbers = some_numbers(random, 9, 7)
    choices = random.integers(0, NUM_TABLES, (NUM_CLASSES, 7)).astype(np.uint8)
    tables = class_tables(even_classes())
    states, words = cpu.encode_numbers(numbers, 3, choices, tables, symbol_tables())
    kind = data.draw(st.sampled_from(["fewer", "more", "random", "states"]))
    if kind == "fewer":
        words = words[: data.draw(st.integers(0, len(words) - 1))]
    elif kind == "more":
        words = np.append(words, np.uint16(7))
    elif kind == "random":
        words = random.integers(0, 1 << 16, data.draw(st.integers(0, 50))).astype(np.uint16)
    else:
        states = states.copy()
        states[data.draw(st.integers(0, 3))] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    around = np.full((13, 7), 5, np.int16)
    is_right = cpu.decode_numbers(words, states, choices, tables, symbol_tables(), around[2:11])
    assert not is_right or not (around[2:11] == numbers).all()
    assert not is_right or kind in ("random", "states")  # by chance, words can be those of other numbers
    assert (around[:2] == 5).all()
    assert (around[11:] == 5).all()


def test_the_tables_are_those_of_the_format() -> None:
    """Their frequencies add up, and zero is the likeliest digit; the tests of the format compare them to its page."""
    tables = symbol_tables()
    assert tables.frequencies.shape == (NUM_TABLES, 256)
    assert (tables.frequencies.astype(int).sum(1) == 1 << SCALE_BITS).all()
    assert (tables.frequencies[:, ESCAPE] == 1).all()
    assert (tables.frequencies.max(1) == tables.frequencies[:, ZERO_DIGIT]).all()
    digits = tables.frequencies[:, :ESCAPE]
    assert (digits == digits[:, ::-1]).all()
    assert tables.low_bits.tolist() == [max(0, number // 4 - 7) for number in range(NUM_SPREADS)] * 2


@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0, 20.0, 300.0])
def test_numbers_take_little_more_than_their_entropy(spread: float) -> None:
    """By the best table: at most 3 % more, or 0.03 bits a number."""
    random = np.random.default_rng(0)
    numbers = np.rint(random.normal(0, spread, (5_000, 8))).astype(np.int16)
    frequencies = np.ones(NUM_CLASSES, np.uint16)
    frequencies[0] = (1 << SCALE_BITS) - NUM_CLASSES + 1
    num_words = []
    for table in range(NUM_TABLES):
        choices = np.full((NUM_CLASSES, 8), table, np.uint8)
        _, words = cpu.encode_numbers(numbers, 40, choices, class_tables(frequencies), symbol_tables())
        num_words.append(len(words))
    assert abs(np.log2(spreads()[int(np.argmin(num_words)) % NUM_SPREADS] / spread)) <= 0.7
    _, counts = np.unique(numbers, return_counts=True)
    shares = counts / counts.sum()
    entropy = -(shares * np.log2(shares)).sum()
    assert entropy * 0.999 <= 16 * min(num_words) / numbers.size <= max(entropy * 1.03, entropy + 0.03)
