"""What a run asks of the host while an accelerator computes: where it waits, and what it holds for checkpoints."""

from collections.abc import Iterator

from meshwright.plan.cost.price import totals
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.plan.given.names import generalize, within
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.show.summary import human_bytes
from meshwright.plan.update.states import LEAST_IN_BLOCKS, in_blocks
from meshwright.train.config import RunConfig
from meshwright.train.schema.optimizer_kinds import QUANTIZED

__all__ = ["host_lines"]


def host_lines(config: RunConfig, plan: ShardingPlan) -> list[str]:
    """Return one line for each thing; none of what every run has: metrics are read while the next step runs."""
    return [*_waits(config, plan), *_copies(config, plan)]


def _waits(config: RunConfig, plan: ShardingPlan) -> Iterator[str]:
    said = "the host waits for the device"
    updaters = config.optimizer.updaters.values()
    waiting = [one.part.use for one in updaters if one.part is not None and not one.part.arguments.get("fused")]
    if waiting:
        yield f"{said} in every step: it decides whether the optimizer steps (optimizer.use={waiting[0]})"
    elif kinds := config.optimizer.kinds & set(QUANTIZED):
        yield f"{said} in every step: it decides whether the optimizer steps (optimizer.kind={min(kinds)})"
        yield from _unblocked(plan)
    elif config.parallel.cpu_offload:
        yield f"{said} in every step: the optimizer runs on the host (parallel.cpu_offload)"
    elif config.optimizer.fused is False or any(group.fused is False for group in config.optimizer.groups):
        yield f"{said} in every step: it decides whether the optimizer steps (optimizer.fused=false)"
    if plan.layout.ep > 1 and plan.experts:
        again = [unit.name for unit in plan.units if unit.activation_checkpointing is not ActivationCheckpointing.NONE]
        runs = plan.options.microbatches * sum(1 + within(row.module, again) for row in plan.experts)
        yield f"{said} {runs:,} times a step: in each run of a mixture, for the numbers of tokens that it exchanges (layout.ep)"


def _unblocked(plan: ShardingPlan) -> Iterator[str]:
    """Say which moments torchao does not round."""
    rules = plan.options.rules
    own = [row for row in plan.parameters if row.trainable and rules[row.update].kind in QUANTIZED]
    whole = [row for row in own if not in_blocks(row, dict(rules[row.update].options))]
    if whole:
        names = ", ".join(dict.fromkeys(generalize(row.name) for row in whole))
        yield (
            f"moments of {len(whole)} of {len(own)} parameters are not rounded: torchao does where a shard has at least "
            f"{LEAST_IN_BLOCKS:,} numbers, and a multiple of a block ({names})"
        )


def _copies(config: RunConfig, plan: ShardingPlan) -> Iterator[str]:
    if not config.checkpoint.asynchronous:
        return
    total, trained = totals(plan), totals(plan).gradient_bytes
    held = total.optimizer_bytes + (trained if config.saves_trained_only else total.parameter_bytes)
    yield f"checkpoints are copied to {human_bytes(held)} of the host's memory per rank (checkpoint.asynchronous)"
