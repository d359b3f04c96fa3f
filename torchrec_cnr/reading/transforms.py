"""Transforms of rows: each is read and checked once, however many checkpoints, shards and threads use it.

The deltas of a chain use a basis that an older checkpoint stored, and often its transform too. These are known by their
SHA-256, so it does not matter which manifest names them.
"""

from collections.abc import Iterable, Iterator, Mapping

from torchrec_cnr.format.blob_bytes import Bytes, decompressed
from torchrec_cnr.format.manifest import Shard
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.quantization import Scheme, Transformed
from torchrec_cnr.quantization.row_transform import Basis, basis_bytes, transform_bytes

_KEPT_BYTES = 16 << 20  # of transforms and bases that a load keeps after the checkpoints that use them


class KnownTransforms:
    """The transforms and bases that were read so far, in one load or for one served model.

    Call :meth:`missing`, read these blobs, and pass them to :meth:`add`. After that, threads may call :meth:`scheme`.
    """

    def __init__(self) -> None:
        self._bases: dict[tuple[str | None, int], Basis] = {}
        self._schemes: dict[tuple[Transformed, int], Transformed] = {}

    def missing(self, shards: Mapping[str, Shard]) -> dict[str, Blob]:
        """Return the blobs of the transforms and bases of shards that are not known, each once.

        Args:
            shards: Shards, by a key that names them in errors.

        Returns:
            The blobs, by a key that names them in errors.
        """
        blobs: dict[object, tuple[str, Blob]] = {}
        for name, scheme, shard in self._unknown(shards):
            for what, key, blob in zip(
                ("transform", "basis"), _keys(scheme, shard), shard.transform_blobs, strict=False
            ):
                if key not in self._bases:
                    blobs.setdefault(key, (f"{what} of {name}", blob))
        return dict(blobs.values())

    def add(self, shards: Mapping[str, Shard], stored: Mapping[str, Bytes], where: str) -> None:
        """Add the transforms of shards.

        Args:
            shards: The shards, as for :meth:`missing`.
            stored: The bytes of at least the blobs that this has returned, by the same keys.
            where: Path or URL of the checkpoint, for errors.

        Raises:
            DamagedError: The bytes are not of these transforms.
        """
        for name, scheme, shard in self._unknown(shards):  # which leaves out what an earlier one has in common
            (own_key, basis_key), num_cols = _keys(scheme, shard), shard.box.num_cols
            basis = self._bases.get(basis_key)
            if basis is None and scheme.basis is not None:
                key = f"basis of {name}"
                basis = Basis.parsed(stored[key].tobytes(), num_cols, f"{where}: {key}")
            key = f"transform of {name}"
            data = decompressed(stored[key].tobytes(), transform_bytes(num_cols), f"{where}: {key}")
            self._schemes[own_key] = scheme.with_data(data, basis, num_cols, f"{where}: {key}")
            if basis is not None:  # now that its digest was compared
                self._bases[basis_key] = basis

    def scheme(self, shard: Shard) -> Scheme:
        """Return the scheme of a shard, with its transform if it has one, which must be known."""
        if not isinstance(shard.scheme, Transformed):
            return shard.scheme
        return self._schemes[_keys(shard.scheme, shard)[0]]

    def limit(self, shards: Iterable[Shard]) -> None:
        """Forget what none of some shards use, if all that is known takes more than 16 MiB."""
        if self.num_bytes <= _KEPT_BYTES:
            return
        keys = {_keys(shard.scheme, shard) for shard in shards if isinstance(shard.scheme, Transformed)}
        own_keys, basis_keys = {own_key for own_key, _ in keys}, {basis_key for _, basis_key in keys}
        self._schemes = {key: scheme for key, scheme in self._schemes.items() if key in own_keys}
        self._bases = {key: basis for key, basis in self._bases.items() if key in basis_keys}

    @property
    def num_bytes(self) -> int:
        """The memory that all of them take."""
        of_bases = sum(4 * basis_bytes(num_cols) for _, num_cols in self._bases)  # as bytes, as fp32, and as fp64
        return of_bases + sum(2 * transform_bytes(num_cols) for _, num_cols in self._schemes)

    def _unknown(self, shards: Mapping[str, Shard]) -> Iterator[tuple[str, Transformed, Shard]]:
        for name, shard in shards.items():
            scheme = shard.scheme
            if isinstance(scheme, Transformed) and _keys(scheme, shard)[0] not in self._schemes:
                yield name, scheme, shard


def _keys(scheme: Transformed, shard: Shard) -> tuple[tuple[Transformed, int], tuple[str | None, int]]:
    """Return the keys of a transform and of its basis. A transform of other columns is none of a shard's."""
    num_cols = shard.box.num_cols
    return (scheme, num_cols), (scheme.basis, num_cols)
