"""The S3 client for URLs with ``s3://``: s3fs without its own retries.

A ``Store`` retries until its own deadline. The retry loops of s3fs and botocore inside it would multiply that time. The
exception is a file that is written piece by piece: it cannot be restarted, so botocore retries each piece.
"""

from collections.abc import Mapping
from typing import Any

from s3fs import S3FileSystem

_ONE_ATTEMPT = {"mode": "standard", "total_max_attempts": 1}
_SOME_ATTEMPTS = {"mode": "standard", "total_max_attempts": 4}  # each takes 15 seconds if the server does not answer


class S3(S3FileSystem):  # type: ignore[misc] # fsspec has no types
    """S3 by s3fs with one attempt per request, unless fsspec's own configuration sets other retries."""

    retries = 1
    attempts: Mapping[str, Any] = _ONE_ATTEMPT

    def __init__(self, *arguments: Any, config_kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*arguments, config_kwargs={"retries": self.attempts, **(config_kwargs or {})}, **options)

    def _open(self, path: str, mode: str = "rb", *arguments: Any, **options: Any) -> Any:
        if mode != "wb":
            return super()._open(path, mode, *arguments, **options)
        patient = _PatientS3(*self.storage_args, **self.storage_options, skip_instance_cache=True)
        return patient._open(path, mode, *arguments, **options)


class _PatientS3(S3):
    attempts = _SOME_ATTEMPTS

    def _open(self, *arguments: Any, **options: Any) -> Any:
        return super(S3, self)._open(*arguments, **options)
