"""Kafka clients: their settings, the conversion of their errors, and the clients that a process keeps."""

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
# The broker has removed the state of a producer that was idle for too long.
FORGOTTEN = frozenset({KafkaError.UNKNOWN_PRODUCER_ID, KafkaError.INVALID_PRODUCER_ID_MAPPING})
MAX_RECORD_BYTES = 1 << 20
BATCH_BYTES = 1_000_000  # largest batch of records; slightly below the default limit of brokers
# The guarantees of the log depend on these settings, so users cannot set them.
OWN_SETTINGS = frozenset(
    {"bootstrap.servers", "transactional.id", "enable.idempotence", "acks", "request.required.acks", "group.id"}
    | {"isolation.level", "auto.offset.reset", "enable.partition.eof", "batch.size", "message.max.bytes"}
    | {"max.in.flight", "max.in.flight.requests.per.connection", "message.timeout.ms", "transaction.timeout.ms"}
    | {"delivery.timeout.ms"}
)


Settings = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Cluster:
    """The address of a Kafka cluster, and the settings of clients that connect to it.

    Attributes:
        bootstrap: ``host:port`` of a broker, or several, separated by commas.
        timeout_secs: Seconds without an answer after which an operation fails.
        config: Further settings of librdkafka as pairs of name and value, such as those for security.
    """

    bootstrap: str
    timeout_secs: float
    config: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def timeout_ms(self) -> int:
        """The timeout in milliseconds, at least 1."""
        return max(1, round(1e3 * self.timeout_secs))

    def settings(self, more: Settings) -> Settings:
        """Return the settings of a client: the common ones, ``more``, and those of ``config``."""
        return {
            "bootstrap.servers": self.bootstrap,
            "socket.timeout.ms": max(1000, self.timeout_ms),
            "reconnect.backoff.ms": 20,  # a new client waits half of this before its first request
            "reconnect.backoff.max.ms": 1000,
            "log_level": 2,  # lost connections are normal, and important errors are raised
            "message.max.bytes": 2 * MAX_RECORD_BYTES,
            "batch.size": BATCH_BYTES,
            **more,
            **dict(self.config),
        }

    def check(self) -> None:
        """Check that librdkafka accepts all settings.

        Raises:
            ConfigurationError: It rejects a setting.
        """
        try:
            Producer(self.settings({}), logger=logger)
        except KafkaException as error:
            raise ConfigurationError(f"'config': {told(error)}") from error

    def result(self, future: Any) -> Any:
        """Return the result of an admin request, or raise ``KafkaException`` after ``timeout_secs``."""
        try:
            return future.result(self.timeout_secs)
        except FutureTimeoutError as error:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from error

    @contextmanager
    def errors(self, action: str) -> Iterator[None]:
        """Turn Kafka's errors into ``StoreError``, which names the failed action and the cluster."""
        try:
            yield
        except KafkaException as error:
            raise StoreError(f"cannot {action} of Kafka at {self.bootstrap}: {told(error)}") from error


class _Closable(Protocol):
    def close(self) -> None: ...


KeyT = TypeVar("KeyT")
ConnectionT = TypeVar("ConnectionT", bound=_Closable)


class OfProcess(Generic[KeyT, ConnectionT]):
    """The objects that this process has created for keys, such as its connections to each log.

    A forked child creates its own objects. It keeps references to its parent's, since closing them crashes librdkafka.

    Args:
        make: Creates the object of a key.
    """

    def __init__(self, make: Callable[[KeyT], ConnectionT]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: dict[KeyT, ConnectionT] = {}
        self._of_parents: list[object] = []
        os.register_at_fork(after_in_child=self._begin_child)

    def get(self, key: KeyT) -> ConnectionT:
        """Return the object of a key, and create it if necessary."""
        with self._lock:
            if key not in self._made:
                self._made[key] = self._make(key)
            return self._made[key]

    def close(self) -> None:
        """Close all objects."""
        with self._lock:
            objects, self._made = self._made, {}
        for closable in objects.values():
            closable.close()

    def _begin_child(self) -> None:
        self._of_parents.append(self._made)
        self._lock, self._made = threading.Lock(), {}


def told(error: BaseException) -> str:
    """Return the text of a Kafka error for a message."""
    reason = error.args[0] if error.args else error
    return f"{reason.name()}: {reason.str()}" if isinstance(reason, KafkaError) else str(reason)


def is_fenced(error: KafkaException) -> bool:
    """Return whether a newer producer has taken the transactional id."""
    return _is_one_of(error, FENCED)


def may_be_fenced(error: KafkaException) -> bool:
    """Return whether a newer producer may have taken the id: also if the broker has removed this producer's state."""
    return _is_one_of(error, FENCED | FORGOTTEN)


def _is_one_of(error: KafkaException, codes: frozenset[int]) -> bool:
    return bool(error.args) and isinstance(error.args[0], KafkaError) and error.args[0].code() in codes
