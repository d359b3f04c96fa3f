"""Data to measure with.

- ``click_model``: a small DLRM that learns from clicks.
- ``clicks``: clicks in time order, real or synthetic, and samples of them for a model.
- ``embedding_rows``: rows to quantize, drawn and trained.
- ``tiled_rows``: large tables of trained rows.
"""
