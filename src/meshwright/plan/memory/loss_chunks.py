"""How the loss is computed: from all logits at once, or in chunks of tokens, so that only those of one chunk ever exist.

The logits of a microbatch are often its largest activation: 8,192 tokens and 262,144 words are 8 GiB in fp32, and a softmax, a
gradient and a copy in the dtype of compute stand beside them. In chunks, each rank computes the logits of some tokens, their
loss and their gradient, and then those of the next ones (as Liger Kernel does, Hsu et al. 2024, arXiv 2410.10989, section 3.2).
"""

from collections.abc import Iterator

from meshwright.errors import Refusal
from meshwright.plan.draft import Draft, Found
from meshwright.plan.given.names import within
from meshwright.plan.given.traces import HeadFacts
from meshwright.plan.result.program import ChunkLoss
from meshwright.plan.result.rows import LossRow
from meshwright.plan.result.sharding_plan import ROOT, ShardingPlan, itemsize

__all__ = ["chunks_of", "loss_actions", "resolve_loss"]

CHUNK = 2**29
"""Bytes of the logits of a chunk, in the dtype of the loss, that :func:`chunks_of` aims at: 1,024 tokens of 131,072
words. Smaller chunks do not lower the peak of a step, and each of them adds to the whole gradient of the head."""


def chunks_of(vocabulary: int, tokens: int, dtype: str) -> int:
    """Return into how many chunks a loss is divided unless the options say it; 0: it is computed at once.

    It depends on nothing else, so that runs of other layouts and devices round alike.

    Args:
        vocabulary: number of words.
        tokens: number of tokens of a microbatch, over all ranks that share its sequences.
        dtype: in which the model computes.
    """
    size = vocabulary * tokens * max(itemsize(dtype), itemsize("float32"))
    return -(-size // CHUNK) if size > CHUNK else 0


def resolve_loss(draft: Draft) -> Found[LossRow | None]:
    """Decide into how many chunks the loss is divided; ``None``: it is computed at once."""
    options, asked = draft.options, draft.options.loss_chunks
    tokens = options.tokens
    dtype = options.param_dtype or next((row.dtype for row in draft.parameters), "float32")
    if asked is None:
        # The largest matrix is looked at first, because finding the head means calling the model.
        most = max((row.shape[0] for row in draft.parameters if len(row.shape) == 2), default=0)
        if tokens is None or not chunks_of(most, tokens * draft.layout.size("cp"), dtype):
            return Found(None)
    elif asked < 2:
        return Found(None)
    facts = draft.model.traces.head or HeadFacts(problem="its output head is unknown")
    problem = facts.problem or _problem(draft, facts.name)
    if asked is None and problem:
        return Found(None, remarks=[f"the loss is computed from all logits at once: {problem}"])
    if problem:
        return Found(None, [Refusal("loss.chunks", f"loss_chunks={asked}: {problem}; the legal value is 0")])
    if asked is None:
        assert tokens is not None
        asked = chunks_of(facts.vocabulary, tokens * draft.layout.size("cp"), dtype)
    if tokens is not None and asked > tokens:
        text = f"loss_chunks={asked}: a rank has {tokens} tokens of a microbatch; legal are 0 to {tokens}"
        return Found(None, [Refusal("loss.chunks", text)])
    return Found(LossRow(facts.name, facts.vocabulary, asked) if asked else None)


def _problem(draft: Draft, head: str) -> str:
    """Return why a head cannot be called several times in a forward; empty: it can."""
    around = [name for name in draft.units if name != ROOT and within(head, (name,))]
    if around:
        return f"its output head {head!r} is in the unit {around[0]!r}, which would gather for each chunk"
    if draft.layout.size("pp") > 1 and draft.options.pipeline_schedule.splits:
        return f"pipeline_schedule={draft.options.pipeline_schedule} splits backward, and chunks compute all of it in forward"
    if draft.options.output_dtype not in (None, "float32", "float64"):
        return f"output_dtype={draft.options.output_dtype} would round the loss"
    return ""


def loss_actions(plan: ShardingPlan) -> Iterator[ChunkLoss]:
    """Yield the action that lets the model return its loss."""
    if plan.loss is not None:
        yield ChunkLoss(plan.loss)
