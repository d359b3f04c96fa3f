"""Benchmarks of storage other than files.

- ``kafka``: saves and loads with rows in Kafka.
- ``s3``: saves and loads by each of the two S3 clients.
"""
