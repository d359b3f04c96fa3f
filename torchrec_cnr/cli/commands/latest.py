"""``cnr latest``: the newest checkpoint of a root."""

from typing import Annotated

import typer

from torchrec_cnr.cli.options import AsJson, Kafka, KafkaFile, KafkaSettings, rows_log
from torchrec_cnr.cli.output import name_cell, print_json, stdout
from torchrec_cnr.lineage.latest import latest as latest_checkpoint
from torchrec_cnr.maintenance.catalog import no_checkpoint
from torchrec_cnr.storage.store import Store


def latest(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A directory of checkpoints.")],
    kafka: Kafka = None,
    kafka_settings: KafkaSettings = None,
    kafka_file: KafkaFile = None,
    as_json: AsJson = False,
) -> None:
    """Print the path of the newest committed checkpoint.

    The exit status is 1 if there is none. Only manifests are read: `cnr verify` says whether the checkpoint can be
    restored.

    Examples:

    - `cnr latest runs/a`
    - `cnr latest s3://bucket/runs/a --json`
    """
    path = latest_checkpoint(root, row_log=rows_log(kafka, kafka_settings, kafka_file))
    if path is None:
        raise no_checkpoint(Store.open(root))
    if as_json:
        print_json({"path": path})
    else:
        stdout().print(name_cell(path))
