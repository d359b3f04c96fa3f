"""Serving: a live model follows the checkpoints that a job commits, and never shows rows of two of them.

A source of ``commits`` names checkpoints. From what is applied to the newest lead ``links``, which are read, verified
and decoded beside the model's ``targets`` (``staged_rows``, ``staged``); then ``lookups`` are held off until all is
copied in (``served``). ``RowSubscriber`` does this again and again.
"""

from torchrec_cnr.serving.commit_sources import Commit, Commits, RootCommits
from torchrec_cnr.serving.subscriber import RowSubscriber
from torchrec_cnr.serving.updates_report import Applied, Lag

__all__ = ["Applied", "Commit", "Commits", "Lag", "RootCommits", "RowSubscriber"]
