"""Packing: the codes of 16 rows, one a lane, into the bytes of each, lowest bits first."""

from numba import njit

from torchrec_cnr.kernels.compiling import named
from torchrec_cnr.kernels.lanes import shifted, spread, where, whole
from torchrec_cnr.kernels.llvm import LANES
from torchrec_cnr.kernels.memory import (
    load,
    load_words,
    put_4_words,
    put_8_words,
    put_16_words,
    put_words,
    store,
)
from torchrec_cnr.kernels.search import inverse_of, position_of


@njit(inline="always")
def _word_of(tile, start, stop, bits, inverse, bias, top):
    """The codes of some columns in one word, the first in its lowest bits."""
    word = whole(spread(0.0))
    for column in range(stop - 1, start - 1, -1):
        word = shifted(word, bits) | whole(position_of(load(tile, column * LANES), inverse, bias, top))
    return word


def _putting_words(bits):
    """A function that puts words of codes of so many bits: a constant, so that a word is made without a loop."""
    per_word = 32 // bits

    def put_words_of_codes(tile, words, num_cols, codes, offsets, scale, bias, is_right):
        top, nothing, inverse = spread((1 << bits) - 1), whole(spread(0.0)), inverse_of(scale)
        num_words = 0
        for start in range(0, num_cols, per_word):
            if start + per_word <= num_cols:
                word = nothing
                for number in range(per_word):
                    code = whole(position_of(load(tile, (start + number) * LANES), inverse, bias, top))
                    word = word | shifted(code, number * bits)
            else:
                word = _word_of(tile, start, num_cols, bits, inverse, bias, top)
            store(words, num_words * LANES, where(is_right, word, nothing))
            num_words += 1
            if num_words == LANES or start + per_word >= num_cols:
                _put_rows(codes, offsets, (start // per_word + 1 - num_words) * 4, words, num_words)
                num_words = 0

    return njit(named(put_words_of_codes, bits))


_put_words_2, _put_words_4, _put_words_8 = _putting_words(2), _putting_words(4), _putting_words(8)


@njit
def put_codes(tile, words, num_cols, bits, codes, offsets, scale, bias, is_right):
    """The codes of 16 rows. The last word of a row may reach into its scale and bias, which come later."""
    if bits == 2:
        _put_words_2(tile, words, num_cols, codes, offsets, scale, bias, is_right)
    elif bits == 4:
        _put_words_4(tile, words, num_cols, codes, offsets, scale, bias, is_right)
    elif bits == 8:
        _put_words_8(tile, words, num_cols, codes, offsets, scale, bias, is_right)
    else:  # eight codes take three bytes
        top, nothing, inverse = spread(7.0), whole(spread(0.0)), inverse_of(scale)
        for start in range(0, num_cols, 8):
            word = _word_of(tile, start, min(start + 8, num_cols), bits, inverse, bias, top)
            put_words(codes, offsets, start // 8 * 3, where(is_right, word, nothing))


@njit
def _put_rows(codes, offsets, at, words, num_words):
    """Up to 16 words of each of 16 rows, side by side."""
    if num_words == 16:
        put_16_words(codes, offsets, at, words)
    elif num_words == 8:
        put_8_words(codes, offsets, at, words)
    elif num_words == 4:
        put_4_words(codes, offsets, at, words)
    else:
        for number in range(num_words):
            put_words(codes, offsets, at + 4 * number, load_words(words, number * LANES))
