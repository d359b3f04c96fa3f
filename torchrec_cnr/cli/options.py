"""Arguments and options that several commands have, each with one name and one meaning."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import torchrec_cnr
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.storage.row_log import RowLog

_PANEL = "Rows in Kafka"

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")]
Everything = Annotated[bool, typer.Option("--all", help="Leave no lines out.")]
Kafka = Annotated[
    str | None,
    typer.Option(
        "--kafka",
        metavar="HOST:PORT/TOPIC",
        help="Where rows of deltas went, if not to files. Several brokers are separated by commas.",
        rich_help_panel=_PANEL,
    ),
]
KafkaSettings = Annotated[
    list[str] | None,
    typer.Option(
        "-X", metavar="KEY=VALUE", help="A setting of librdkafka, such as for security.", rich_help_panel=_PANEL
    ),
]
KafkaFile = Annotated[
    Path | None,
    typer.Option(
        "--kafka-config", "-F", metavar="FILE", help="Such settings, one a line; secrets.", rich_help_panel=_PANEL
    ),
]
Threads = Annotated[int, typer.Option("--threads", min=1, help="Requests in flight at once.")]


def rows_log(kafka: str | None, settings: Sequence[str] | None, file: Path | None) -> RowLog | None:
    """The log that the options name; None where there is none.

    Raises:
        ConfigurationError: They make no sense, there is no such topic, or what Kafka needs is not installed. Values of
            settings, which may be secret, are not told.
        StoreError: Kafka does not answer in time.
    """
    if kafka is None:
        if settings or file is not None:
            raise ConfigurationError("-X and --kafka-config are of no use without --kafka HOST:PORT/TOPIC")
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
        raise ConfigurationError(f"there is no topic {topic!r}, or none of its markers, in Kafka at {bootstrap}")
    return rows


def _settings_in(file: Path | None) -> dict[str, str]:
    if file is None:
        return {}
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--kafka-config {file}: it cannot be read ({type(error).__name__})") from error
    return dict(_setting(line, f"--kafka-config {file}") for line in lines if line and not line.startswith("#"))


def _setting(text: str, where: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigurationError(f"{where}: a setting must be KEY=VALUE, and one is not")
    return key.strip(), value.strip()
