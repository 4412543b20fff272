"""All rules, ordered so that a rule may rely on those before it."""

from __future__ import annotations

from autotune.routes.contract import features, identity, metadata, operands, state
from autotune.routes.contract.call import Rule

RULES: tuple[Rule, ...] = (
    identity.FINGERPRINT,
    identity.RANKS,
    identity.SUPPORTED,
    operands.BATCH,
    operands.ROWS,
    operands.HEADS,
    operands.DTYPES,
    operands.DEVICE,
    operands.CURRENT_DEVICE,
    operands.UNIFORM,
    metadata.PAGE_TABLE,
    metadata.SEQ_LENS,
    metadata.EMPTY_ROWS,
    metadata.LENGTHS,
    metadata.MASKED_ROWS,
    metadata.NEW_TOKENS,
    metadata.TABLE_WIDTH,
    metadata.MAX_SEQ_LEN,
    metadata.SPLIT_WIDTH,
    metadata.TABLE_MULTIPLE,
    metadata.TABLE_ENTRIES,
    identity.PROVEN_BOX,
    operands.STRIDES,
    operands.DENSE_QUERY,
    operands.LAYOUT,
    features.HOST_SCALES,
    features.SCALES,
    features.Q_SCALE,
    features.SINKS,
    features.SOFT_CAP,
    features.PLAN,
    features.DRAFT_MASK,
    operands.GRID,
    operands.FAR_PAGES,
    operands.OUT,
    operands.ALIGNMENT,
    state.WORKSPACE,
    state.PRIVATE_WORKSPACE,
    state.SEMAPHORES,
    state.GRAPH,
)
