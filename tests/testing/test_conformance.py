"""The conformance checks: file systems that keep what checkpoints are built on pass, and those that break it do not."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import fsspec
import pytest

from tests.testing import broken_file_systems
from tests.testing.broken_file_systems import Honest
from torchrec_cnr.errors import ConfigurationError, StoreError
from torchrec_cnr.storage.store import Store
from torchrec_cnr.testing import ConformanceCheck, Fault, FaultyStore, conformance_checks, run_conformance
from torchrec_cnr.testing.__main__ import main

pytestmark = pytest.mark.long

CHECKS = conformance_checks(num_faults=2, large_bytes=3 << 20)
TRIPS = [check.name for check in CHECKS if check.name.startswith("round trip")]
BROKEN: dict[str, tuple[type[Honest], ...]] = {
    "whole files": (broken_file_systems.LosesTheEnd,),
    "ranged reads": (broken_file_systems.ReadsWhole,),
    "listing after a write": (broken_file_systems.RemembersListings, broken_file_systems.HidesTheNewest),
    "absent or no answer": (broken_file_systems.FindsAll, broken_file_systems.Forbids),
    "removal": (broken_file_systems.KeepsAll,),
    "odd names": (broken_file_systems.Unquotes,),
    "many at once": (broken_file_systems.MixesUploads,),
    "times": (broken_file_systems.LivesInThePast,),
    "exclusive create": (broken_file_systems.Overwrites,),
    "one winner": (broken_file_systems.LooksFirst,),
    "own commit again": (broken_file_systems.SaysBusy,),
    "half a commit": (broken_file_systems.KeepsAll,),
    "a large file": (broken_file_systems.KeepsTwoMiB,),
} | dict.fromkeys(TRIPS, (broken_file_systems.HidesTheNewest,))

numbers = count()
each_check = pytest.mark.parametrize("check", CHECKS, ids=str)


@pytest.fixture(params=["local", "memory", "faulty", "honest"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty directory in each file system that keeps what it promises."""
    if request.param == "faulty":
        with FaultyStore(tmp_path) as store:
            yield store.url
        return
    fsspec.register_implementation("honest", Honest, clobber=True)
    yield {"local": str(tmp_path), "memory": f"memory://{next(numbers)}", "honest": f"honest://{tmp_path}"}[
        request.param
    ]


@pytest.mark.long
@each_check
def test_file_systems_that_keep_their_promises_pass(url: str, check: ConformanceCheck) -> None:
    """Local files, memory, the store that can be spoiled, and one that only fsspec knows; nothing is left there."""
    check(url)
    store = Store.open(url)
    assert store.fs.find(store.path) == []


def test_each_check_has_what_breaks_it() -> None:
    """No check is without a file system that it must refuse, and none has another's name."""
    assert set(BROKEN) == {check.name for check in CHECKS}
    assert len({str(check) for check in CHECKS}) == len(CHECKS)
    assert {f"round trip, {fault.value}" for fault in Fault if fault is not Fault.CRASH} < set(TRIPS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("check", "broken"),
    [(check, broken) for check in CHECKS for broken in BROKEN[check.name]],
    ids=lambda value: str(value) if isinstance(value, ConformanceCheck) else value.__name__,
)
def test_file_systems_that_break_a_promise_are_refused(
    tmp_path: Path, check: ConformanceCheck, broken: type[Honest]
) -> None:
    """Each check fails where its promise is broken, and the error says which promise, and where."""
    fsspec.register_implementation(broken.protocol, broken, clobber=True)
    url = f"{broken.protocol}://{tmp_path}"
    with pytest.raises(StoreError) as raised:
        check(url)
    assert str(raised.value).startswith(f"{check.name}: {check.promise} Not met at {url}: ")


def test_a_spoiled_store_is_refused(tmp_path: Path) -> None:
    """A fault that nobody tries again is a broken promise."""
    with FaultyStore(tmp_path) as store:
        store.faults[2] = Fault.TRUNCATE
        outcomes = list(run_conformance(store.url, CHECKS[:2]))
    assert [outcome.problem is None for outcome in outcomes] == [False, True]


def test_places_that_cannot_be_opened_are_no_broken_promises() -> None:
    """The call is wrong, not the file system."""
    with pytest.raises(ConfigurationError, match="no-such-protocol"):
        CHECKS[0]("no-such-protocol://x")


# The command line.


def test_the_command_tells_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each promise, the problem below one that is broken, and a status that scripts can use."""
    assert main([str(tmp_path), "--only", "whole"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "checks: 1 passed, 0 failed"
    fsspec.register_implementation("losestheend", broken_file_systems.LosesTheEnd, clobber=True)
    assert main([f"losestheend://{tmp_path}", "--only", "whole"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAILED  whole files")
    assert "the bytes of 'pack': expected b'one two three', got b'one two thre'" in out


@pytest.mark.parametrize("words", [["no-such-protocol://x"], ["/x", "--only", "no such check"], []])
def test_wrong_command_lines_have_a_status_of_their_own(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever asks for nothing, or for what is not there, is told how to ask."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: python -m torchrec_cnr.testing" in capsys.readouterr().err


def test_racers_need_no_torch() -> None:
    """The processes that race for a commit are started in no time."""
    asked = "import sys, torchrec_cnr.testing.racing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0
