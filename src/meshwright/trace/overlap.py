"""Which seconds of a ring's and of a pipeline's messages compute hides.

A ring sends keys and values while a part is computed, and in backward the gradients of the part before; only those of the last
part have nothing to hide behind.

A pipeline's schedule is replayed with messages and without: by how much it takes longer is what they expose.

Axes do not share the bandwidth of a link here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plan.axes.context.sharing import attention_runs, ring_message_bytes
from meshwright.plan.axes.pipeline.replay import Replay, replay_of_plan
from meshwright.plan.axes.pipeline.stage_plan import pipeline_messages
from meshwright.plan.given.closed_choices import ContextBalance, ContextMethod
from meshwright.plan.result.sharding_plan import ShardingPlan, itemsize
from meshwright.trace.in_time.fsdp_replay import Price

__all__ = ["PipelineTimes", "Speeds", "exposed_of_ring", "pipeline_times", "waits_of_pipeline"]


@dataclass(frozen=True)
class Speeds:
    """What a device does in a second.

    Attributes:
        products: operations of matrix products in the dtype of compute.
        precise: the same in fp32.
        memory: bytes that elementwise operators read and write.
    """

    products: float
    precise: float
    memory: float


SCORES_MOVED = (9, 15)
"""How often the ring's operators beside products read or write all scores of a part, in fp32, forward and backward: those of
``_part`` and ``_part_backward`` in distributed/context/ring.py."""


def exposed_of_ring(plan: ShardingPlan, length: int, speeds: Speeds, price: Price) -> float:
    """Return the seconds of an optimizer step in which attentions wait for their ring.

    Args:
        plan: the plan, or its part on one stage.
        length: length of a sequence.
        speeds: those of the device.
        price: seconds of a collective.
    """
    cp, tokens, total = plan.layout.size("cp"), plan.options.tokens, 0.0
    if cp == 1 or tokens is None:
        return 0.0
    moved_forward, moved_backward = (passes * itemsize("float32") / speeds.memory for passes in SCORES_MOVED)
    for row in plan.attentions:
        if row.method is not ContextMethod.RING:
            continue
        (forwards, backwards), sent, returned = attention_runs(plan, row), *ring_message_bytes(plan, row, tokens)
        keys, gradients = price("cp", "send", sent), price("cp", "send", returned)
        # Of the four pairs of chunks of a part, a causal zigzag computes three of a rank's own and two of another's; where the
        # sequence is cut otherwise, the last rank sees all.
        zigzag = row.causal and plan.options.context_balance is ContextBalance.ZIGZAG
        parts = [0.75 if zigzag else 1.0] + [0.5 if zigzag else 1.0] * (cp - 1)
        scores, both = tokens * row.heads * (length / cp), row.key_size + row.value_size
        forward = scores * (2 * both / speeds.products + moved_forward)
        backward = scores * (2 * row.key_size / speeds.products + 4 * both / speeds.precise + moved_backward)
        total += forwards * sum(max(0.0, keys - part * forward) for part in parts[:-1])
        # With the first part only keys and values are on their way, with the last one only gradients.
        waits = [keys, *[keys + gradients] * (cp - 2), gradients]
        left = sum(max(0.0, seconds - part * backward) for seconds, part in zip(waits, parts, strict=True))
        total += backwards * (left + gradients)
    return plan.options.microbatches * total


def waits_of_pipeline(plan: ShardingPlan, rank: int, stages: Sequence[float], price: Price) -> tuple[float, float]:
    """Return the seconds of an optimizer step in which a rank of `pp` waits for what other ranks compute, and for messages.

    Args:
        plan: a plan with stages.
        rank: the rank.
        stages: of each stage, the seconds of all turns of a microbatch.
        price: seconds of a collective.
    """
    times = pipeline_times(plan, rank, stages, price)
    return times.bubble, times.messages


@dataclass(frozen=True)
class PipelineTimes:
    """A run of a pipeline's schedule, with messages.

    Attributes:
        run: the run, in seconds.
        message: seconds of a message.
        bubble: seconds of a step in which the rank waits for what others compute.
        messages: seconds by which messages make a step longer.
    """

    run: Replay
    message: float
    bubble: float
    messages: float


def pipeline_times(plan: ShardingPlan, rank: int, stages: Sequence[float], price: Price) -> PipelineTimes:
    """Replay a plan's schedule in seconds; the arguments are those of :func:`waits_of_pipeline`."""
    alone, runs = replay_of_plan(plan, seconds=stages), plan.options.runs_per_step
    bubble = alone.length * alone.idle[rank] * runs
    messages, size = pipeline_messages(plan, rank)
    if not messages or size is None:
        return PipelineTimes(alone, 0.0, bubble, 0.0)
    message = price("pp", "send", size // messages)
    run = replay_of_plan(plan, seconds=stages, message=message)
    return PipelineTimes(run, message, bubble, (run.length - alone.length) * runs)
