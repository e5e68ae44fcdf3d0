"""Resolves everything that is known about a run before a process starts: layout, model on meta, spec, plan, and all problems.

``plan``, ``train`` and every worker call the same functions, so they cannot differ.
"""

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, UnsupportedError, during
from meshwright.layout import Layout
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.remembered_passes import RememberedPasses
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train.config import RunConfig
from meshwright.train.start.limits import vocabulary_problems
from meshwright.train.start.run_files import Paths

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from meshwright.models.objective import Objective
    from meshwright.plan.given.inspection import Inspection

__all__ = [
    "RunSetup",
    "change_setup",
    "describe_model",
    "describe_run",
    "make_setup",
    "plain_config",
    "spec_of_run",
    "vocabulary_defaults",
    "with_tokenizer",
]


REMARK = (
    "reference: before the first step of the run, one forward of all sequences, without gradient, in evaluation mode: about a "
    "third of the operations of an epoch that trains all parameters; 4 bytes a token on disk, and none on the devices"
)
"""What a reference costs that is computed once."""

EACH_STEP = "before each step, one forward more of all its microbatches, without gradient"


@dataclass(frozen=True)
class RunSetup:
    """A run that is resolved for a world size.

    Attributes:
        config: the configuration.
        layout: the layout, with resolved sizes.
        model: the model on the meta device.
        spec: what the model declares about itself.
        plan: what every rank will hold and send.
        objective: what the model is trained to do.
        teacher: the model that it learns from, on the same ranks; ``None``: there is none, or it was not asked for.
        facts: the facts of the model that the plan was made from; ``None``: it was made from the model.
        remembered: what the resolver found in plans of this model with other layouts and choices.
    """

    config: RunConfig
    layout: Layout
    model: "PreTrainedModel"
    spec: ParallelSpec
    plan: ShardingPlan
    objective: "Objective"
    teacher: "RunSetup | None" = None
    facts: "Inspection | None" = field(default=None, compare=False, repr=False)
    remembered: RememberedPasses = field(default_factory=RememberedPasses, compare=False, repr=False)

    @property
    def paths(self) -> Paths:
        """Where the run keeps its files."""
        return Paths(self.config.directory)

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of the parameters in its checkpoints."""
        rows = self.plan.parameters
        return {row.name: row.shape for row in rows if row.trainable or not self.config.saves_trained_only}


@during("the model and its plan are built")
def make_setup(
    config: RunConfig,
    world_size: int,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    planning: bool = False,
    described: "tuple[ParallelSpec, PreTrainedModel] | None" = None,
    objective_given: Any = None,
) -> RunSetup:
    """Resolve a configuration for a world size. This starts no process and reads no weights.

    Args:
        config: the configuration.
        world_size: number of ranks.
        tokenizer: gives vocabulary size and special tokens to a new model's config that leaves them out; ``None``: the
            vocabulary size comes from the configuration.
        planning: whether the model will not run here. Then the package of its flash kernel may be absent.
        described: the model in place of that of the configuration (:func:`describe_model`); ``None``: that.
        objective_given: an objective, a class or a function in place of that of the configuration; ``None``: that.

    Raises:
        MeshwrightError: all problems of layout, batch sizes, model and plan that can be found independently of each other.
    """
    from meshwright.models.added_modules import add_modules
    from meshwright.models.objective import PRECOMPUTED
    from meshwright.objectives.call import passes_before
    from meshwright.plan.given.inspection import inspect_model
    from meshwright.train.start.run_plan import check_run, plan_run, with_canvases

    spec, model = described or describe_model(config, tokenizer, planning=planning)
    layout, objective = check_run(config, world_size, spec, model, tokenizer, objective_given=objective_given)
    if objective.without_head:
        spec = replace(spec, uses_all_parameters=False)
    spec = with_canvases(add_modules(spec, model, objective.added, objective.module_runs), objective)
    more = [f"{EACH_STEP}: {one.what}" for one in passes_before(objective)] + [REMARK] * (objective.reference == PRECOMPUTED)
    spec = replace(spec, remarks=(*spec.remarks, *more))
    facts = inspect_model(spec, model)
    plan = plan_run(config, layout, spec, model, facts, objective)
    return RunSetup(config, layout, model, spec, plan, objective, facts=facts)


_LOOKED_AT = ("activation_checkpointing", "activation_checkpointing_layers", "compile", "output_dtype")
"""Keys of `parallel` that an objective may look at."""


def change_setup(setup: RunSetup, config: RunConfig, world_size: int, *, program: bool = True) -> RunSetup:
    """Return a run of the same model with another layout or other choices. It is checked as a run is, and its model is shared.

    Args:
        setup: the run; its model is on the meta device still, and nothing was parallelized.
        config: its configuration, with other values in the sections ``layout``, ``parallel`` (but not the dtype of
            parameters), ``training`` and ``optimizer``.
        world_size: number of ranks.
        program: whether its plan has a program. Without one it can be priced, and not trained.

    Raises:
        MeshwrightError: as :func:`make_setup`.
    """
    from meshwright.plan.given.inspection import inspect_model
    from meshwright.train.start.run_plan import check_run, plan_run

    same = all(getattr(setup.config.parallel, name) == getattr(config.parallel, name) for name in _LOOKED_AT)
    known = setup.objective if same else None
    layout, objective = check_run(config, world_size, setup.spec, setup.model, known_objective=known)
    _check_adapter(config)
    facts = setup.facts or inspect_model(setup.spec, setup.model)
    plan = plan_run(config, layout, setup.spec, setup.model, facts, objective, setup.remembered, program=program)
    return replace(setup, config=config, layout=layout, plan=plan, objective=objective, teacher=None, facts=facts)


def with_tokenizer(draft: RunSetup, tokenizer: "PreTrainedTokenizerBase") -> RunSetup:
    """Return a run that was resolved without its tokenizer, as it is with it: the same unless a new model gets other values.

    Raises:
        MeshwrightError: as :func:`make_setup`; also, the tokenizer has more tokens than the vocabulary.
    """
    from meshwright.models.weights.build import pretrained_config
    from meshwright.train.start.run_plan import together

    config = draft.config
    known, unknown = (pretrained_config(config.model, vocabulary_defaults(config, some)) for some in (tokenizer, None))
    if known.to_dict() != unknown.to_dict():
        return make_setup(config, draft.layout.world_size, tokenizer)
    if problems := vocabulary_problems(config, draft.model, len(tokenizer)):
        raise together(problems)
    return draft


def describe_model(
    config: RunConfig, tokenizer: "PreTrainedTokenizerBase | None" = None, *, planning: bool = False
) -> "tuple[ParallelSpec, PreTrainedModel]":
    """Return the spec of a run's model, and the model on the meta device.

    Raises:
        MeshwrightError: the model cannot be built, or declares too little.
    """
    from meshwright.models.weights.build import build_on_meta, pretrained_config
    from meshwright.models.weights.source import refuse_untrainable
    from meshwright.user_code import import_modules

    import_modules(config.imports)
    if tokenizer is None:  # nothing is prepared yet; a run that has its tokenizer passed this check before
        refuse_untrainable(config.model)
    hf_config = pretrained_config(config.model, vocabulary_defaults(config, tokenizer))
    model = build_on_meta(
        config.model, hf_config, adapter=config.adapter, param_dtype=config.parallel.param_dtype, planning=planning
    )
    return spec_of_run(config, model), model


def describe_run(config: RunConfig) -> "tuple[ParallelSpec, PreTrainedModel]":
    """Return the spec of a run's model, and the model on the meta device, with what its objective adds.

    Raises:
        MeshwrightError: the model cannot be built, or declares too little; or the objective is refused.
    """
    from meshwright.models.added_modules import add_modules
    from meshwright.train.run_objective import make_objective

    spec, model = describe_model(config)
    objective = make_objective(config, model)
    return add_modules(spec, model, objective.added, objective.module_runs), model


def spec_of_run(config: RunConfig, model: "PreTrainedModel") -> ParallelSpec:
    """Return the spec of a model on the meta device, with what the adapters of a run add to it.

    Raises:
        MeshwrightError: the model declares too little, or cannot be trained so.
    """
    from meshwright.models.specs.registry import get_parallelization_strategy
    from meshwright.models.specs.strategy import ParallelizationStrategy

    strategy = get_parallelization_strategy(model)
    if type(strategy).parallelize is not ParallelizationStrategy.parallelize:
        raise UnsupportedError(
            "model.strategy",
            f"{type(strategy).__name__}.parallelize: is overridden, but a run does not call it; override spec() or "
            "carry_out(), or shard with FSDP2Manager in a loop of your own",
        )
    spec = strategy.spec(model, config.parallel.param_dtype)
    if config.adapter is not None:
        from meshwright.models.adapters.adapt import remarks_of_adapter, unit_of_adapters

        spec = replace(spec, remarks=(*spec.remarks, *remarks_of_adapter(model)))
        if config.adapter.reduce == "once":
            _check_adapter(config)
            spec = replace(spec, units=(*spec.units, unit_of_adapters(model)))
    return spec


def _check_adapter(config: RunConfig) -> None:
    if config.adapter is not None and config.adapter.reduce == "once" and (config.layout.pp or 1) > 1:
        raise ConfigError(
            "adapter.reduce", "adapter.reduce=once: stages of a pipeline reduce by themselves; with pp the legal value is unit"
        )


def vocabulary_defaults(config: RunConfig, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
    """Return the values for a new model's config that come from the tokenizer where the config does not give them."""
    if tokenizer is not None:
        special = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return {"vocab_size": len(tokenizer), **special}
    if config.model.configured("vocab_size") is not None:
        return {}
    if config.tokenizer.path is not None:
        from meshwright.data.tokenizer import load_tokenizer

        return vocabulary_defaults(config, load_tokenizer(config.tokenizer.path, config.model.trust_remote_code))
    if config.tokenizer.vocab_size is not None:
        # A tokenizer that is trained here gives its special tokens these ids; the plan does not depend on them.
        return {"vocab_size": config.tokenizer.vocab_size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if config.model.config is not None:
        raise ConfigError(
            "model.config.vocab_size",
            "model.config.vocab_size: is required if neither tokenizer.path nor tokenizer.vocab_size is set",
        )
    return {}


def plain_config(model: "PreTrainedModel") -> dict[str, Any]:
    """Return a model's config as plain values that JSON can represent."""
    return json.loads(model.config.to_json_string(use_diff=False))
