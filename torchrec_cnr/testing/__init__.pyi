from .conformance import ConformanceCheck, Outcome, conformance_checks, run_conformance
from .faults import Fault, FaultyStore, Operation

__all__ = [
    "ConformanceCheck",
    "Fault",
    "FaultyStore",
    "Operation",
    "Outcome",
    "conformance_checks",
    "run_conformance",
]
