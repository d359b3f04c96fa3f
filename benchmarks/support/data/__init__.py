"""Data to measure with.

- ``click_model``: a small DLRM that learns from clicks.
- ``click_samples``: clicks as samples for a model.
- ``clicks``: clicks in time order, real or made up.
- ``embedding_rows``: rows to quantize, drawn and trained.
"""
