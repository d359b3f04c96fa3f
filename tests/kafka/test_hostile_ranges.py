"""Log ranges of hostile manifests: what they claim is not allocated before it is there."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")

import torchrec_cnr as cnr
from torchrec_cnr.format.manifest import LogRange
from torchrec_cnr.kafka.connection import KafkaLog

RANGE = LogRange("rows", 0, 0, 1 << 32, 1 << 30, None)


class _Consumer:
    """Has no record."""

    def records(self, *place: Any) -> Iterator[Any]:
        return iter(())


@contextmanager
def _one(*place: Any) -> Iterator[_Consumer]:
    yield _Consumer()


def test_a_pack_of_exabytes_is_missing() -> None:
    """A blob of 2^60 bytes, in parts of 2^30 of which none is there, as cnr verify would read it."""
    log = KafkaLog.__new__(KafkaLog)

    @contextmanager
    def errors(what: str) -> Iterator[None]:
        yield

    log.rules = SimpleNamespace(cluster=SimpleNamespace(bootstrap="nowhere", errors=errors))  # type: ignore[assignment]
    log._consumers = SimpleNamespace(one=_one)  # type: ignore[assignment]
    with pytest.raises(cnr.DamagedError, match=r"part 0 of 1073741824 of pack is missing"):
        log.read("pack", 1 << 60, RANGE, 0, 1 << 60)
