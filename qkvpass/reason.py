"""Why a copy went or stayed: one stable code for every way a decision can end."""

import enum


class Reason(str, enum.Enum):
    """The outcome of one decision. Values are stable and part of the JSON schema."""

    REMOVED = "removed"
    REMOVED_CASCADE = "removed-cascade"

    UNTAGGED_OP = "untagged-op"
    DENSE_ONLY_OP = "dense-only-op"
    TAG_CONDITION = "tag-condition"
    LAST_DIM_STRIDE = "last-dim-stride"
    ALIGNMENT = "alignment"
    BROADCAST_STRIDE = "broadcast-stride"
    OFFSET_RANGE = "offset-range"
    STORAGE_OFFSET = "storage-offset"
    MIXED_LAYOUT = "mixed-layout"
    MUTATED = "mutated"
    OPAQUE_CONSUMER = "opaque-consumer"
    VIEW_NEEDS_DENSE = "view-needs-dense"
    OUTPUT_LAYOUT = "output-layout"
    GRAPH_OUTPUT = "graph-output"
    SUBGRAPH_BOUNDARY = "subgraph-boundary"
    NOT_A_LAYOUT_COPY = "not-a-layout-copy"
    UNBACKED_SHAPE = "unbacked-shape"
    BACKWARD_NOT_CAPABLE = "backward-not-capable"
    MEMORY_PINNED = "memory-pinned"
    PRODUCER_FUSED = "producer-fused"
    NO_GAIN = "no-gain"
    NO_ATTENTION_CONSUMER = "no-attention-consumer"

    def __str__(self) -> str:
        return self.value

    @property
    def removed(self) -> bool:
        """Whether a copy that ended this way is gone."""
        return self in (Reason.REMOVED, Reason.REMOVED_CASCADE)
