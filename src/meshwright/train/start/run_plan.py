"""The checks of a run that need its model and no plan, the options of its plan, and the plan."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from meshwright.data.loader import check_batch_sizes
from meshwright.data.rows.columns import ROUTED_EXPERTS
from meshwright.distributed.experts.balance import refusals
from meshwright.distributed.experts.router_replay import replay_refusals
from meshwright.errors import ConfigError, LayoutError, MeshwrightError, PartError, PlanError
from meshwright.layout import Layout, divisors
from meshwright.models.objective import NextToken, Objective
from meshwright.objectives.call import named
from meshwright.objectives.documents import most_documents
from meshwright.objectives.layouts import layout_problems
from meshwright.objectives.references import reference_problems
from meshwright.plan.given.inspection import Inspection, model_sizes
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.given.traces import Traces
from meshwright.plan.remembered_passes import RememberedPasses
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan, itemsize
from meshwright.train.config import RunConfig
from meshwright.train.optimizer import update_rules
from meshwright.train.run_objective import make_objective
from meshwright.train.start.limits import length_problems, vocabulary_problems
from meshwright.train.start.part_checks import problems_of_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_run", "microbatches_per_step", "plan_run", "together"]


def microbatches_per_step(config: RunConfig, layout: Layout) -> int:
    """Return the number of forward-backward passes of a rank in an optimizer step.

    Raises:
        ConfigError: the data ranks do not divide the batch sizes; the error names the legal values.
    """
    ranks = layout.size("dp")
    training = config.training
    check_batch_sizes(training.global_batch_size, training.microbatch_size, ranks)
    return training.global_batch_size // (training.microbatch_size * ranks)


def check_run(
    config: RunConfig,
    world_size: int,
    spec: ParallelSpec,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    objective_given: Any = None,
    known_objective: Objective | None = None,
) -> tuple[Layout, Objective]:
    """Return the layout of a run, with resolved sizes, and its objective.

    Args:
        config: the configuration.
        world_size: number of ranks.
        spec: what the model declares about itself.
        model: the model on the meta device.
        tokenizer: its tokenizer, whose number of tokens is compared; ``None``: unknown.
        objective_given: an objective, a class or a function in place of that of the configuration; ``None``: that.
        known_objective: the objective of the run, made already; ``None``: it is made, and so are the user's other parts.

    Raises:
        MeshwrightError: all problems of layout, batch sizes and model that can be found independently of each other.
    """
    problems: list[MeshwrightError] = []
    layout, sizes = config.layout.layout(), model_sizes(spec, model)
    if sizes.kv_groups and sizes.heads and sizes.kv_heads and sizes.heads % sizes.kv_heads:
        problems.append(
            ConfigError(
                "model.config.heads",
                f"{config.model.path or 'model.config'}: {spec.sizes['kv_heads']}={sizes.kv_heads} does not divide "
                f"{spec.sizes['heads']}={sizes.heads}; legal are {', '.join(map(str, divisors(sizes.heads)))}",
            )
        )
    try:
        layout = layout.resolve(world_size, sizes)
        microbatches_per_step(config, layout)
    except (LayoutError, ConfigError) as error:
        problems.append(error)
    if config.parallel.activation_checkpointing_save:
        from meshwright.distributed.memory.activation_checkpointing import find_operators

        try:
            find_operators(config.parallel.activation_checkpointing_save)
        except PlanError as error:
            problems.append(error)
    objective = known_objective or NextToken()
    if known_objective is None:
        try:
            objective = make_objective(config, model, objective_given)
        except (ConfigError, PartError) as error:
            problems.append(error)
    problems.extend(map(ConfigError, layout_problems(objective, layout, config.data.packing)))
    if unfit := reference_problems(objective, config.adapter):
        problems.append(ConfigError(unfit))
    if known_objective is None:
        problems.extend(problems_of_parts(config))
    problems.extend(length_problems(config, model))
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        problems.append(
            ConfigError(
                "model.config.router_loss",
                "model.config.output_router_logits=true: transformers' auxiliary loss of the router is no part of the training "
                "loss; the legal value is false; for a balance loss, set its coefficient moe.aux_loss",
            )
        )
    if tokenizer is not None:
        problems.extend(vocabulary_problems(config, model, len(tokenizer)))
    if problems:
        raise together(problems)
    return layout, objective


def with_canvases(spec: ParallelSpec, objective: Objective) -> ParallelSpec:
    """Return a spec whose traces know how long the canvases of an objective are, if it has some: a plan counts their bytes."""
    canvas, traces = objective.canvas_sizes, cast("Callable[..., Traces] | None", spec.traces)
    return spec if canvas is None or traces is None else replace(spec, traces=partial(traces, canvas=canvas))


def plan_run(
    config: RunConfig,
    layout: Layout,
    spec: ParallelSpec,
    model: "PreTrainedModel",
    facts: Inspection,
    objective: Objective,
    remembered: RememberedPasses | None = None,
    *,
    program: bool = True,
) -> ShardingPlan:
    """Return the plan of a run.

    Args:
        config: the configuration.
        layout: its layout, with resolved sizes.
        spec: what the model declares about itself, with what the objective adds.
        model: the model on the meta device.
        facts: the facts of that model.
        objective: what it is trained to do.
        remembered: what passes of the resolver found in other plans of this model with this spec.
        program: whether its program is written.

    Raises:
        MeshwrightError: all problems of the plan that can be found independently of each other.
    """
    options = _options(config, layout, model, objective)
    plan = resolve(spec, facts, layout, options, remembered=remembered, program=program)
    refused = refusals(
        plan,
        aux_loss=config.moe.aux_loss or 0.0,
        bias_update_rate=config.moe.bias_update_rate or 0.0,
        uncounted=objective.uncounted,
    )
    if (routes := config.data.values.get(ROUTED_EXPERTS)) is not None:
        routers = {row.router: row.experts for row in plan.experts}
        refused += replay_refusals(plan, routes.width or 0, lambda: facts.traces.choices(routers), objective.uncounted)
    if refused:
        raise ConfigError(refused)
    return plan


def _options(config: RunConfig, layout: Layout, model: "PreTrainedModel", objective: Objective) -> ParallelOptions:
    """Return the options of a run's plan: those that are configured, and what follows from the rest of the configuration."""
    options, optimizer = config.parallel.options(microbatches_per_step(config, layout)), config.optimizer
    loss_parallel, loss_chunks = options.loss_parallel, options.loss_chunks
    if objective.whole_logits and layout.size("tp") > 1:
        if loss_parallel:
            words = f"objective {named(objective)} needs the logits of all words; legal are false and null"
            raise ConfigError("objective.layout", f"parallel.loss_parallel=true: {words}")
        loss_parallel = False
    if not objective.chunks:
        if loss_chunks:
            words = f"training.objective={objective.name} has its own way from logits to losses; the legal value is 0"
            raise ConfigError("loss.chunks", f"parallel.loss_chunks={loss_chunks}: {words}")
        loss_chunks = 0
    tokens, experts = _tokens(config, layout, model)
    gathers, reductions, sums = objective.collectives
    gathered, reduced = _gathered(config, objective, tokens)
    return replace(
        options,
        loss_parallel=loss_parallel,
        loss_chunks=loss_chunks,
        freeze=(*options.freeze, *objective.frozen),
        decay=tuple(optimizer.decay),
        no_decay=tuple(optimizer.no_decay),
        groups=tuple(
            (one.match, one.share(optimizer.lr), one.lr_decay, one.weight_decay, optimizer.others(one))
            for one in optimizer.groups
        ),
        updates=update_rules(optimizer),
        tokens=tokens,
        experts_of_token=experts,
        packed=config.data.packed,
        sequences=config.training.microbatch_size,
        balance_loss=config.training.microbatch_size if config.moe.aux_loss else 0,
        objective_gathers=gathers,
        objective_reductions=reductions,
        objective_gathered=gathered,
        objective_reduced=reduced,
        objective_sums=sums,
    )


def _gathered(config: RunConfig, objective: Objective, tokens: int) -> tuple[int | None, int | None]:
    """Return the bytes of the values of a rank that an objective gathers in a microbatch, and of those with a gradient.

    Args:
        config: the configuration.
        objective: the objective, which was tried.
        tokens: of a microbatch on a rank.
    """
    if objective.gathered is None:
        return None, None
    parallel, rows = config.parallel, config.training.microbatch_size
    computes = parallel.output_dtype or parallel.param_dtype or config.model.dtype
    documents = most_documents(objective, config.data.packing, config.data.sequence_length) or 1
    sizes = [(one.size(rows, tokens // rows, documents, itemsize(computes)), one.reduced) for one in objective.gathered]
    return sum(size for size, _ in sizes), sum(size for size, reduced in sizes if reduced)


def _tokens(config: RunConfig, layout: Layout, model: "PreTrainedModel") -> tuple[int, int | None]:
    """Return the tokens of a microbatch on a rank, and the experts per token; the bytes of activations depend on both."""
    multiple = config.parallel.options(1).sequence_multiple(layout)
    length = -(-config.data.sequence_length // multiple) * multiple // layout.size("cp")
    text = model.config.get_text_config()
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
    experts = next((number for name in names if isinstance(number := getattr(text, name, None), int)), None)
    return config.training.microbatch_size * length, experts


def together(problems: list[MeshwrightError]) -> MeshwrightError:
    """Return one error that holds the problems of several errors."""
    kind = type(problems[0]) if len({type(problem) for problem in problems}) == 1 else ConfigError
    return kind([line for problem in problems for line in problem.problems])
