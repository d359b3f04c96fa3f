"""Arguments and options that several commands have, each with one name and one meaning."""

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")]
Everything = Annotated[bool, typer.Option("--all", help="Leave no lines out.")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="Requests in flight at once.")]
