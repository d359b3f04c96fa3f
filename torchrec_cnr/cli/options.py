"""Arguments and options that several commands accept, each with the same name and meaning everywhere."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

import torchrec_cnr
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.quantization import AdaptiveAsymmetric, Asymmetric, NoQuantization, Scheme
from torchrec_cnr.storage.row_log import RowLog

_PANEL = "Rows in Kafka"
EXACT = "exact"
_SCHEMES: Mapping[str, Scheme] = {
    **{str(bits): AdaptiveAsymmetric(bits) for bits in (2, 3, 4)},
    "8": Asymmetric(8),
    EXACT: NoQuantization(),
}


def scheme_of_bits(bits: str) -> Scheme:
    """Return the scheme for the value of ``--bits``.

    Raises:
        ConfigurationError: There is none.
    """
    if bits not in _SCHEMES:
        raise ConfigurationError(f"--bits must be one of {', '.join(_SCHEMES)} (got {bits!r})")
    return _SCHEMES[bits]


Bits = Annotated[str, typer.Option("--bits", metavar="N", help="Bits per value of tables: 2, 3, 4, 8, or exact.")]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Everything = Annotated[bool, typer.Option("--all", help="Show all lines, however many there are.")]
Kafka = Annotated[
    str | None,
    typer.Option(
        "--kafka",
        metavar="HOST:PORT/TOPIC",
        help="Kafka topic that contains the rows of deltas. Separate several brokers by commas.",
        rich_help_panel=_PANEL,
    ),
]
KafkaSettings = Annotated[
    list[str] | None,
    typer.Option(
        "-X", metavar="KEY=VALUE", help="A librdkafka setting. May be given several times.", rich_help_panel=_PANEL
    ),
]
KafkaFile = Annotated[
    Path | None,
    typer.Option(
        "--kafka-config",
        "-F",
        metavar="FILE",
        help="File of settings, one per line. Use it for secrets.",
        rich_help_panel=_PANEL,
    ),
]
Threads = Annotated[int, typer.Option("--threads", min=1, metavar="N", help="Number of requests in flight at once.")]


def rows_log(kafka: str | None, settings: Sequence[str] | None, file: Path | None) -> RowLog | None:
    """Return the Kafka topic that the options name, or None if they name none.

    Raises:
        ConfigurationError: The options are wrong, there is no such topic, or a package for Kafka is not installed. The
            message contains no values of settings, since they may be secret.
        StoreError: Kafka does not answer in time.
    """
    if kafka is None:
        if settings or file is not None:
            raise ConfigurationError("-X and --kafka-config need --kafka HOST:PORT/TOPIC")
        return None
    bootstrap, slash, topic = kafka.rpartition("/")
    if not (slash and bootstrap and topic):
        raise ConfigurationError(f"--kafka must be HOST:PORT/TOPIC (got {kafka!r})")
    config = {**_settings_in(file), **dict(_setting(text, "-X") for text in settings or ())}
    try:
        rows = torchrec_cnr.KafkaRows(bootstrap, topic, config=config)
    except ImportError as error:
        raise ConfigurationError("--kafka needs confluent-kafka: pip install 'torchrec-cnr[kafka]'") from error
    if not rows.open(may_make=False):
        raise ConfigurationError(f"Kafka at {bootstrap} lacks topic {topic!r} or the topic of its commit records")
    return rows


def _settings_in(file: Path | None) -> dict[str, str]:
    if file is None:
        return {}
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--kafka-config {file}: cannot be read ({type(error).__name__})") from error
    return dict(_setting(line, f"--kafka-config {file}") for line in lines if line and not line.startswith("#"))


def _setting(text: str, where: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigurationError(f"{where}: each setting must be KEY=VALUE")
    return key.strip(), value.strip()
