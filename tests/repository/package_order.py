"""The order of packages: what may import what."""

# A package, or a module at the top, imports from rows above its own in this table, and nothing from its own row but
# itself.
ORDER = (
    {"errors", "version", "human_text", "dependencies"},
    {"arguments"},
    {"progress", "throttling", "gc_pause"},
    {"telemetry"},
    {"kernels"},
    {"quantization"},
    {"format"},
    {"policies", "sharding"},
    {"storage"},
    {"lineage", "kafka"},
    {"tracking"},
    {"reading"},
    {"saving", "loading"},
    {"maintenance", "sizing"},
    {"manager", "serving"},
    {"__init__"},
    {"cli", "testing"},
)
RANK_OF = {unit: rank for rank, units in enumerate(ORDER) for unit in units}
