"""Data to measure with.

- ``click_model``: a small DLRM that learns from clicks.
- ``clicks``: clicks in time order, real or made up, and as samples for a model.
- ``embedding_rows``: rows to quantize, drawn and trained.
"""
