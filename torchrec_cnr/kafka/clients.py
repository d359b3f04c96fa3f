"""Kafka clients: their settings, their errors as ours, and what a process keeps of them."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torchrec_cnr.errors import ConfigurationError, StoreError

try:
    from confluent_kafka import KafkaError, KafkaException, Producer
except ImportError as error:
    raise ImportError("KafkaRows needs confluent-kafka: pip install 'torchrec_cnr[kafka]'") from error

logger = logging.getLogger("torchrec_cnr.kafka")

FENCED = frozenset({KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED})
# What a broker says of a producer that has rested for so long that the broker has removed what it knew of it.
FORGOTTEN = frozenset({KafkaError.UNKNOWN_PRODUCER_ID, KafkaError.INVALID_PRODUCER_ID_MAPPING})
MAX_RECORD_BYTES = 1 << 20
BATCH_BYTES = 1_000_000  # of records that are sent together; what brokers take by default is a little more
# On these, what is promised of the log stands.
OWN_SETTINGS = frozenset(
    {"bootstrap.servers", "transactional.id", "enable.idempotence", "acks", "request.required.acks", "group.id"}
    | {"isolation.level", "auto.offset.reset", "enable.partition.eof", "batch.size", "message.max.bytes"}
    | {"max.in.flight", "max.in.flight.requests.per.connection", "message.timeout.ms", "transaction.timeout.ms"}
    | {"delivery.timeout.ms"}
)


Settings = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Cluster:
    """How to reach Kafka.

    Attributes:
        bootstrap: ``host:port``, or several, separated by commas.
        timeout_secs: How long it may not answer.
        config: Further settings of librdkafka, such as those for security, as pairs.
    """

    bootstrap: str
    timeout_secs: float
    config: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def timeout_ms(self) -> int:
        """In milliseconds."""
        return max(1, round(1e3 * self.timeout_secs))

    def settings(self, more: Settings) -> Settings:
        """Of a client."""
        return {
            "bootstrap.servers": self.bootstrap,
            "socket.timeout.ms": max(1000, self.timeout_ms),
            "reconnect.backoff.ms": 20,  # half of it passes before a client that has found the cluster asks it anything
            "reconnect.backoff.max.ms": 1000,
            "log_level": 2,  # connections come and go; what matters is raised
            "message.max.bytes": 2 * MAX_RECORD_BYTES,
            "batch.size": BATCH_BYTES,
            **more,
            **dict(self.config),
        }

    def check(self) -> None:
        """See that librdkafka knows all settings.

        Raises:
            ConfigurationError: It does not.
        """
        try:
            Producer(self.settings({}), logger=logger)
        except KafkaException as error:
            raise ConfigurationError(f"'config': {told(error)}") from error

    def result(self, future: Any) -> Any:
        """What an admin request gives, within the time that the cluster has."""
        try:
            return future.result(self.timeout_secs)
        except FutureTimeoutError as error:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from error

    @contextmanager
    def errors(self, action: str) -> Iterator[None]:
        """Kafka's errors become ``StoreError``, which names what could not be done, and where."""
        try:
            yield
        except KafkaException as error:
            raise StoreError(f"cannot {action} of Kafka at {self.bootstrap}: {told(error)}") from error


class _Closable(Protocol):
    def close(self) -> None: ...


KeyT = TypeVar("KeyT")
ConnectionT = TypeVar("ConnectionT", bound=_Closable)


class OfProcess(Generic[KeyT, ConnectionT]):
    """What this process has made for each key, such as its connections to each log.

    A child that was forked makes its own. Those of its parent are kept, as ending them crashes librdkafka.

    Args:
        make: Makes what a key stands for.
    """

    def __init__(self, make: Callable[[KeyT], ConnectionT]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: dict[KeyT, ConnectionT] = {}
        self._of_parents: list[object] = []
        os.register_at_fork(after_in_child=self._begin_child)

    def get(self, key: KeyT) -> ConnectionT:
        """What a key stands for."""
        with self._lock:
            if key not in self._made:
                self._made[key] = self._make(key)
            return self._made[key]

    def close(self) -> None:
        """End all."""
        with self._lock:
            made, self._made = self._made, {}
        for each in made.values():
            each.close()

    def _begin_child(self) -> None:
        self._of_parents.append(self._made)
        self._lock, self._made = threading.Lock(), {}


def told(error: BaseException) -> str:
    """A Kafka error for a message."""
    reason = error.args[0] if error.args else error
    return f"{reason.name()}: {reason.str()}" if isinstance(reason, KafkaError) else str(reason)


def is_fenced(error: KafkaException) -> bool:
    """Whether a producer with the same transactional id has come later."""
    return _is_one_of(error, FENCED)


def may_be_fenced(error: KafkaException) -> bool:
    """Whether one may have: the broker does not know this producer any more, and has taken nothing from it."""
    return _is_one_of(error, FENCED | FORGOTTEN)


def _is_one_of(error: KafkaException, codes: frozenset[int]) -> bool:
    return bool(error.args) and isinstance(error.args[0], KafkaError) and error.args[0].code() in codes
