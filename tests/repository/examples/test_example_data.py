"""The example's readers: a file comes out as samples, in time order, at positions that are the same for everybody."""

import gzip
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import delimited
from click_data import Criteo, MovieLens, NewsClicks, open_stream
from delimited import DataError
from samples import Samples, Stream, concatenate, global_batches, hash_words, mix64, rank_share, table_rows
from synthetic_clicks import SyntheticClicks, zipf_ranks
from synthetic_criteo import SyntheticCriteo

REAL_CLICKS = Path(__file__).resolve().parents[4] / "shared" / "data" / "clicks.csv.gz"
RATINGS = [(7, 31, "3.5", 1300), (7, 32, "4.0", 1100), (8, 31, "5.0", 1200), (9, 33, "0.5", 1100)]


@pytest.fixture
def clicks_csv(tmp_path: Path) -> Path:
    """A file of 500 clicks."""
    random = np.random.default_rng(5)
    rows = [
        f"{random.integers(50)},{1506826329267796 + n // 3},{random.integers(1000, 1060)},{1506826800026 + 40_000 * n},"
        f"4,{random.integers(1, 4)},17,1,{random.integers(1, 29)},2"
        for n in range(500)
    ]
    return write(tmp_path / "clicks.csv", "\n".join([NewsClicks.HEADER, *rows, ""]))


def write(path: Path, text: str) -> Path:
    """Write a text file, compressed if its name says so."""
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def first(stream: Stream, count: int, start: int = 0) -> Samples:
    """The ``count`` samples from ``start`` on."""
    return next(global_batches(stream, start, count))


def assert_equal(left: Samples, right: Samples) -> None:
    """Both hold the same samples, bit for bit."""
    for one, other in ((left.dense, right.dense), (left.ids, right.ids), (left.labels, right.labels)):
        np.testing.assert_array_equal(one, other)


def test_each_click_is_followed_by_the_same_reader_with_an_article_clicked_before(clicks_csv: Path) -> None:
    """Even samples are the file's clicks with label 1; odd ones differ only in the article and the label."""
    rows = np.loadtxt(clicks_csv, delimiter=",", skiprows=1, dtype=np.int64)
    samples = first(NewsClicks(clicks_csv), 1000)
    clicked, drawn = samples[0::2], samples[1::2]
    np.testing.assert_array_equal(clicked.ids[:, :3], rows[:, :3])
    assert clicked.labels.all()
    assert not drawn.labels.any()
    np.testing.assert_array_equal(np.delete(clicked.ids, 2, axis=1), np.delete(drawn.ids, 2, axis=1))
    np.testing.assert_array_equal(clicked.dense, drawn.dense)
    assert all(drawn.ids[n, 2] in rows[:n, 2] for n in range(1, 500))
    assert (drawn.ids[:, 2] != clicked.ids[:, 2]).mean() > 0.9


def test_context_values_of_different_columns_are_different_ids(clicks_csv: Path) -> None:
    """An environment of 1 and a country of 1 must not share a row."""
    context = first(NewsClicks(clicks_csv), 1000).ids[:, 3:]
    sets = [set(column.tolist()) for column in context.T]
    assert sum(map(len, sets)) == len(set().union(*sets))


@pytest.mark.parametrize("name", ["clicks.csv.gz", "clicks-dos.csv", "clicks-no-newline.csv"])
def test_compression_and_line_ends_change_nothing(clicks_csv: Path, name: str) -> None:
    """gzip, CR LF and a missing last newline give the samples of the plain file."""
    text = clicks_csv.read_text()
    text = text.replace("\n", "\r\n") if "dos" in name else text.rstrip("\n") if "no-newline" in name else text
    other = write(clicks_csv.with_name(name), text)
    assert_equal(first(NewsClicks(clicks_csv), 1000), first(NewsClicks(other), 1000))


def test_blocks_of_text_do_not_show(clicks_csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 100 bytes at a time, less than two lines, gives the samples of one read, negatives included."""
    at_once = first(NewsClicks(clicks_csv), 1000)
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 100)
    assert_equal(at_once, first(NewsClicks(clicks_csv), 1000))


@pytest.mark.parametrize(("name", "separator"), [("ratings.csv", ","), ("ratings.dat", "::"), ("ratings.dat.gz", "::")])
def test_ratings_come_by_time_and_four_stars_are_a_click(tmp_path: Path, name: str, separator: str) -> None:
    """MovieLens files are by user; the stream is by time, equal times in the file's order."""
    lines = [separator.join(map(str, rating)) for rating in RATINGS]
    header = [MovieLens.HEADER] if separator == "," else []
    samples = first(MovieLens(write(tmp_path / name, "\n".join([*header, *lines, ""]))), 4)
    assert samples.ids.tolist() == [[7, 32], [9, 33], [8, 31], [7, 31]]
    assert samples.labels.tolist() == [1, 0, 1, 0]


def test_criteo_lines_have_missing_and_negative_counts(tmp_path: Path) -> None:
    """Missing and negative counts are 0, others log(1 + x); equal categories are equal ids, missing ones too."""
    counts = ["", "-2", "0", "1"] + ["99"] * 9
    categories = ["68fd1e64", "80e26c9b", ""] + ["68fd1e64"] * 23
    lines = ["\t".join(["1", *counts, *categories]), "\t".join(["0", *counts[::-1], *categories[::-1]])]
    samples = first(Criteo(write(tmp_path / "train.txt", "\n".join([*lines, ""]))), 2)
    assert samples.labels.tolist() == [1, 0]
    np.testing.assert_allclose(samples.dense[0], np.log1p([0, 0, 0, 1] + [99] * 9), rtol=1e-6)
    assert samples.ids.shape == (2, 26)
    assert len(set(samples.ids[0, :4].tolist())) == 3
    np.testing.assert_array_equal(samples.ids[0], samples.ids[1, ::-1])


def test_hashes_are_splitmix64_and_ignore_the_width_of_a_column() -> None:
    """Ids must be the same on every machine, and whatever else is in the block of text."""
    assert int(mix64(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF
    words = [b"", b"a", b"68fd1e64", b"longer than eight"]
    together = hash_words(np.array(words))
    alone = [int(hash_words(np.array([word]))[0]) for word in words]
    assert together.tolist() == alone
    assert len(set(alone)) == len(words)


def test_hashed_rows_fill_a_table_evenly() -> None:
    """Consecutive ids fall on rows like balls thrown at random: about 1 - 1/e of the rows are hit."""
    rows = table_rows(np.arange(10_000, dtype=np.uint64), 10_000)
    assert rows.min() >= 0
    assert rows.max() < 10_000
    assert 0.61 < len(np.unique(rows)) / 10_000 < 0.65


def bad_files() -> Iterator[tuple[str, str, bytes | None, str]]:
    """Name, format, content and what the message must say."""
    click = b"1,2,3,1506826800026,4,3,2,1,21,1\n"
    head = NewsClicks.HEADER.encode() + b"\n"
    yield "gone.csv", "clicks", None, r"gone\.csv: No such file"
    yield "empty.csv", "clicks", b"", r"empty\.csv: expected at least one interaction"
    yield "header.csv", "clicks", head, r"header\.csv: expected at least one interaction"
    yield "other.csv", "clicks", b"userId,rating\n1,2\n", r"other\.csv: line 1: expected .*'user_id,.* got 'userId"
    yield "short.csv", "clicks", head + click + b"1,2\n", r"short\.csv: line 3: expected 10 fields, got 2"
    yield "word.csv", "clicks", head + click + click.replace(b"3,", b"x,", 1), r"word\.csv: line 3, field 3: .*'x'"
    yield "huge.csv", "clicks", head + click.replace(b"1,", b"9" * 30 + b",", 1), r"huge\.csv: line 2, field 1"
    yield "cut.csv.gz", "clicks", gzip.compress(head + click * 99)[:-20], r"cut\.csv\.gz: not a complete gzip file"
    yield "plain.csv.gz", "clicks", head + click, r"plain\.csv\.gz: not a complete gzip file"
    yield "ratings.csv", "movielens", head + click, r"ratings\.csv: line 1: expected the header 'userId"
    yield "stars.dat", "movielens", b"1::2::many::3\n", r"stars\.dat: line 1, field 3: expected a number, got 'many'"
    yield "day_0", "criteo", b"1\t2\n", r"day_0: line 1: expected 40 fields, got 2"
    yield "empty_day", "criteo", b"", r"empty_day: expected at least one interaction"


@pytest.mark.parametrize(("name", "data_format", "content", "message"), list(bad_files()))
def test_a_bad_file_is_named_with_its_line(
    tmp_path: Path, name: str, data_format: str, content: bytes | None, message: str
) -> None:
    """One line that says which file, which line, what was expected and what is there."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_stream(data_format, tmp_path / name, seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("data_format", "path"), [("synthetic", Path("x.csv")), ("clicks", None)])
def test_a_file_and_made_up_clicks_exclude_each_other(data_format: str, path: Path | None) -> None:
    """Neither a file that would be ignored nor a format without a file."""
    with pytest.raises(DataError, match=f"--format {data_format} .*--data"):
        open_stream(data_format, path, seed=0)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    """What the operating system says reaches the user in one line."""
    with pytest.raises(DataError, match="Is a directory"):
        open_stream("clicks", tmp_path, seed=0)


def test_a_file_starts_over_after_its_end(clicks_csv: Path) -> None:
    """Global positions go on counting: sample 1000 of a file of 1000 is its first."""
    stream = NewsClicks(clicks_csv)
    one_pass = first(stream, 1000)
    assert_equal(first(stream, 1000, start=300), concatenate([one_pass[300:], one_pass[:300]]))
    assert_equal(first(stream, 10, start=7_990), one_pass[990:])


@pytest.mark.parametrize("kind", ["clicks", "synthetic", "criteo"])
@pytest.mark.parametrize("batch_size", [64, 5000])
def test_a_batch_depends_only_on_its_position(clicks_csv: Path, kind: str, batch_size: int) -> None:
    """Starting at batch 3 gives batch 3, whatever was read before it."""
    streams: dict[str, Stream] = {
        "clicks": NewsClicks(clicks_csv),
        "synthetic": SyntheticClicks(seed=3),
        "criteo": SyntheticCriteo(seed=3),
    }
    stream = streams[kind]
    batches = list(itertools.islice(global_batches(stream, 0, batch_size), 5))
    resumed = list(itertools.islice(global_batches(stream, 3 * batch_size, batch_size), 2))
    assert all(len(batch) == batch_size for batch in batches)
    for before, after in zip(batches[3:], resumed, strict=True):
        assert_equal(before, after)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_a_batch_without_gap_or_overlap(world_size: int) -> None:
    """The shares of all ranks, one after another, are the global batch on any number of ranks."""
    batch = first(SyntheticClicks(seed=3), 64)
    shares = [rank_share(batch, rank, world_size) for rank in range(world_size)]
    assert {len(share) for share in shares} == {64 // world_size}
    assert_equal(batch, concatenate(shares))


def test_made_up_clicks_depend_on_the_seed_alone() -> None:
    """The same seed gives the same samples, another seed others."""
    samples = first(SyntheticClicks(seed=1), 9000)
    assert_equal(samples, first(SyntheticClicks(seed=1), 9000))
    other = first(SyntheticClicks(seed=2), 9000)
    assert (samples.ids != other.ids).any()
    assert (samples.labels != other.labels).any()


def test_made_up_popularity_is_skewed_and_drifts() -> None:
    """A window hits few articles often, and a later window hits other ones, so that modified rows accumulate."""
    stream = SyntheticClicks(seed=0)
    early, late = (first(stream, 20_000, start).ids[:, 1] for start in (0, 2_000_000))
    _, clicks = np.unique(early, return_counts=True)
    clicks.sort()
    assert clicks[-len(clicks) // 100 :].sum() > 0.2 * clicks.sum()
    assert len(np.intersect1d(early, late)) < 0.5 * len(np.unique(early))


def test_made_up_labels_can_be_learned() -> None:
    """Whoever knew the planted scores would have a loss well below that of guessing the mean."""
    stream = SyntheticClicks(seed=0)
    samples = first(stream, 20_000)
    known = np.clip(stream._click_probability(samples.ids, samples.dense), 1e-9, 1 - 1e-9)
    mean = samples.labels.mean()
    loss = -np.mean(samples.labels * np.log(known) + (1 - samples.labels) * np.log(1 - known))
    guess = -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean))
    assert loss < guess - 0.15


def test_zipf_ranks_follow_the_law() -> None:
    """Rank 0 is as many times as frequent as rank 9 as the law says, and every rank lies in range."""
    ranks = zipf_ranks(np.random.default_rng(0).random(1_000_000), 1000, 1.2)
    counts = np.bincount(ranks, minlength=1000)
    assert len(counts) == 1000
    assert counts.min() > 0
    expected = (1 - 2**-0.2) / (10**-0.2 - 11**-0.2)
    assert counts[0] / counts[9] == pytest.approx(expected, rel=0.05)


@pytest.mark.long
@pytest.mark.skipif(not REAL_CLICKS.exists(), reason=f"needs {REAL_CLICKS.name}")
def test_three_million_real_clicks_are_all_read() -> None:
    """Every click of the real file and its partner, in time order."""
    passes = NewsClicks(REAL_CLICKS).one_pass()
    num_samples, num_clicked = np.sum([(len(block), block.labels.sum()) for block in passes], axis=0)
    assert (num_samples, num_clicked) == (2 * 2_988_181, 2_988_181)


def test_made_up_ads_have_the_shape_of_criteos() -> None:
    """As many numbers and categories as its files have, of few values and of many; neither label is rare."""
    samples = first(SyntheticCriteo(seed=0), 9000)
    assert samples.dense.shape == (9000, Criteo.NUM_INTS)
    assert samples.ids.shape == (9000, Criteo.NUM_CATEGORIES)
    num_values = [len(np.unique(column)) for column in samples.ids.T]
    assert (num_values[0], min(num_values), max(num_values) > 2000) == (3, 3, True)
    assert 0.2 < samples.labels.mean() < 0.8
