"""Tests of PyTorch that cannot pass with our classes, and why."""

REFUSED: dict[str, str] = {
    "TestDCPCompatbility.test_storage_meta": "it reads attributes that only DCP's own writer and reader have",
}
