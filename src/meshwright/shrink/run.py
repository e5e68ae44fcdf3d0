"""shrink(): turns any run that `train` accepts into one for a few CPU processes, and keeps what a proof of its layout needs.

The layout keeps which axes are above 1. The model keeps its classes, its parameter names, and every kind of layer in their
order. The batch keeps its gradient accumulation. Sizes only decrease. Three rules make this work for families that are unknown
here:

- The *kind* of a layer is read from the built model, on the meta device: classes, names, shapes, flags, its entries in the
  config's lists, and what the patterns of `parallel` (freeze, sync_units, activation_checkpointing_layers) and of
  `optimizer.no_decay` decide about it. The first layer of each kind is kept.
- Each number of the config is reduced by what its key means (`small_config.py`): heads, sizes, experts, windows, ids.
- The small model is built too, and refused unless it has the classes, names, ties and kinds of layers of the large one.

In patterns that number a layer ('model.layers.17.**'), the number is replaced by that of the kept layer of the same kind. So
every kept layer is frozen, synchronised and recomputed exactly as before; patterns for which this is impossible are refused.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from meshwright.data.loader import check_batch_sizes
from meshwright.errors import LayoutError, MeshwrightError, ModelError, Refusal
from meshwright.layout import AXES, Layout, ModelSizes, divisors
from meshwright.models.model_config import ModelConfig
from meshwright.models.specs.registry import spec_of
from meshwright.models.weights.build import build_on_meta, pretrained_config
from meshwright.plan.given.inspection import model_sizes
from meshwright.plan.given.options import NF4_BLOCK
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.memory.loss_chunks import chunks_of
from meshwright.shrink.kinds import kinds_of, layers_of, lists_of, lost_between, second_of_ties
from meshwright.shrink.patterns import (
    BY_MODULE,
    GROUPS,
    OF_MODULES,
    OF_OPTIMIZER,
    Patterns,
    marks_of_layers,
    renumbered_patterns,
)
from meshwright.shrink.small_config import ALWAYS, RULES, Change, Needs, small_config
from meshwright.train.config import RunConfig
from meshwright.train.run_objective import make_objective
from meshwright.train.start.run_plan import microbatches_per_step
from meshwright.train.start.setup import vocabulary_defaults
from meshwright.user_code import import_modules

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["MAX_PROCESSES", "Change", "shrink"]

MAX_PROCESSES = 8
"""The largest number of processes that shrink() chooses itself."""

SEQUENCE = 64
"""Number of tokens in a sequence; a shorter original is kept."""

CHUNKS = 3
"""Number of chunks of a loss, if the original computes it in chunks."""

SMALL = 1_000_000
"""Most parameters of a model that is not shrunk."""


def shrink(config: RunConfig, world_size: int | None = None) -> tuple[RunConfig, int, tuple[Change, ...]]:
    """Return a small run with the structure of a large one. Reads no weights.

    Args:
        config: configuration of a run of any size.
        world_size: number of processes of the audit; ``None``: ``launch.nproc``, if it is 2 to 8 and the layout resolves for
            it. Otherwise the fewest, at most 8, with which every axis above 1 stays above 1; a number with which the experts
            keep FSDP (``ep_shard`` above 1) is preferred to a smaller one.

    Returns:
        The small configuration (its model has random weights), the number of processes, and what was changed.

    Raises:
        LayoutError: the model or the number of processes does not allow the layout.
        ConfigError: batch sizes or numbered patterns cannot be kept.
        ModelError: the model cannot be built, or would lose something.
    """
    import_modules(config.imports)
    changes: list[Change] = []

    def change(section: str, old: Any, new: Mapping[str, Any], why: str = "") -> Any:
        """Return a section with new values, and record the changes."""
        pairs = [(key, getattr(old, key), after) for key, after in new.items()]
        changes.extend(Change(f"{section}.{key}", before, after, why) for key, before, after in pairs if after != before)
        return old.model_copy(update=dict(new))

    source = config.model
    if source.attn_implementation not in (None, "eager", "sdpa"):
        source = change("model", source, {"attn_implementation": None}, "not for CPUs")
    defaults = vocabulary_defaults(config, None)
    large_config = pretrained_config(source, defaults)
    large = build_on_meta(source, large_config)
    spec = spec_of(large, config.parallel.param_dtype)

    sizes = model_sizes(spec, large)
    chosen, world, microbatches = _shrink_layout(config, world_size, sizes)
    layout = chosen.resolve(world)
    length, unit = min(SEQUENCE, config.data.sequence_length), 2 * layout.size("cp")
    if config.data.sequence_length % unit == 0:
        length -= length % unit  # context parallel gives each of its ranks two pieces of a sequence
    micro = min(config.training.microbatch_size, 2)
    batch = {"microbatch_size": micro, "global_batch_size": micro * microbatches * layout.size("dp")}
    sections = {
        "layout": change("layout", config.layout, asdict(chosen)),
        "training": change("training", config.training, batch),
        "data": change("data", config.data, {"sequence_length": length}),
    }
    if source.path is not None:
        changes.append(Change("model.path", source.path, None, "random weights"))
    kv_heads, shared_by = sizes.kv_heads or 0, config.layout.tp or 1
    pipeline = config.parallel.pipeline
    stages = layout.size("pp") * pipeline.resolved_stages_per_rank
    packed = config.adapter is not None and config.adapter.base is not None
    shares_heads, block = 0 < kv_heads < shared_by, NF4_BLOCK if packed else 1
    needs = Needs(layout.size("tp"), layout.ep, stages, length, shares_heads=shares_heads, block=block)
    patterns = {key: getattr(config.parallel, key) for key in ("freeze", *OF_MODULES, *BY_MODULE)}
    patterns |= {key: getattr(config.optimizer, key) for key in OF_OPTIMIZER}
    groups = config.optimizer.groups
    patterns[GROUPS] = {one.match: number for number, one in enumerate(groups)}  # a plan refuses two of one pattern
    model, renumbered = _shrink_model(source, large, large_config, spec, defaults, needs, patterns, changes)
    why = "numbers of the layers that stay"
    if optimizer_patterns := {key: renumbered.pop(key) for key in OF_OPTIMIZER if key in renumbered}:
        found = renumbered.pop(GROUPS).items()
        optimizer_patterns[GROUPS] = [groups[number].model_copy(update={"match": match}) for match, number in found]
        sections["optimizer"] = change("optimizer", config.optimizer, optimizer_patterns, why)
    if pipeline.cuts:
        renumbered["pipeline"] = pipeline.model_copy(update={"cuts": []})
    parallel = change("parallel", config.parallel, renumbered, why)
    parallel = change("parallel", parallel, {"loss_chunks": _loss_chunks(config, large, spec)}, "in chunks, as before")
    return config.model_copy(update={**sections, "model": model, "parallel": parallel}), world, tuple(changes)


def _loss_chunks(config: RunConfig, model: "PreTrainedModel", spec: ParallelSpec) -> int | None:
    """Return ``parallel.loss_chunks`` of the small run, whose loss is in chunks if that of the large one is."""
    asked = config.parallel.loss_chunks
    if asked is None:
        vocabulary = model.config.get_text_config().vocab_size
        tokens = config.training.microbatch_size * config.data.sequence_length
        dtype = config.parallel.param_dtype or config.model.dtype
        possible = chunks_of(vocabulary, tokens, dtype) and make_objective(config, model).chunks
        head = spec.traces(model).head if possible and spec.traces is not None else None
        return CHUNKS if head is not None and not head.problem else None
    return min(asked, CHUNKS)


# -- layout and batch -----------------------------------------------------------------------------------------------------


def _shrink_layout(config: RunConfig, world_size: int | None, sizes: ModelSizes) -> tuple[Layout, int, int]:
    """Return the layout, the number of processes, and the microbatches of a step: at most 3, and above 1 if they were."""
    original, nproc, training = config.layout.layout(), config.launch.nproc, config.training
    if world_size is not None and world_size < 2:
        raise LayoutError("audit.processes", f"--nproc={world_size}: an audit compares one process with at least 2")
    known = {axis: size for axis in AXES if (size := getattr(original, axis)) not in (None, -1)}
    free = [axis for axis in AXES if axis not in known]
    full_layout = None
    if not free or len(free) > 1 or min(*known.values(), original.ep) < 1:
        full_layout = original.resolve(max(1, math.prod(known.values())), sizes)
    elif problems := sizes.problems(replace(original, **{free[0]: 1})):
        raise LayoutError(problems)  # a layout that the model does not allow must not be shrunk to one that it allows
    full_layout = full_layout or _resolved(original, nproc, sizes)
    microbatches = microbatches_per_step(config, full_layout) if full_layout else None

    if world_size is None and nproc is not None and 2 <= nproc <= MAX_PROCESSES and _resolved(original, nproc, sizes):
        world_size = nproc
    if world_size is not None and _resolved(original, world_size, sizes):
        chosen = original
    else:
        # An inferred axis counts as above 1, unless it is 1 with the run's number of processes.
        least = 1 if free and full_layout and full_layout.world_size > 1 and full_layout.size(free[0]) == 1 else 2
        tried = {*range(2, MAX_PROCESSES + 1), world_size or 2}
        fits = {count: fit for count in sorted(tried) if (fit := _fitting(original, known, free, least, count, sizes))}
        if world_size is None and fits:
            world_size = min(fits, key=lambda count: (fits[count][0], count))
        if world_size not in fits:
            raise LayoutError(_too_few(original, known, least, world_size, list(fits)))
        chosen = fits[world_size][1]

    assert world_size is not None
    if microbatches is None:
        ranks = chosen.resolve(world_size).size("dp")
        if training.global_batch_size < min(training.microbatch_size, 2) * ranks:
            check_batch_sizes(training.global_batch_size, training.microbatch_size, ranks)
        microbatches = max(1, training.global_batch_size // (training.microbatch_size * ranks))
    pp = chosen.resolve(world_size).size("pp")
    return chosen, world_size, config.parallel.pipeline.least(pp, min(microbatches, 3))


def _resolved(layout: Layout, world_size: int | None, sizes: ModelSizes) -> Layout | None:
    try:
        return layout.resolve(world_size, sizes) if world_size is not None else None
    except LayoutError:
        return None


def _fitting(
    original: Layout, known: Mapping[str, int], free: Sequence[str], least: int, world_size: int, sizes: ModelSizes
) -> tuple[bool, Layout] | None:
    """Return the best layout for a number of processes, and whether its experts lose FSDP (ep_shard is 1, and was more)."""
    choices = {axis: _smaller(size, max(world_size, MAX_PROCESSES)) for axis, size in (*known.items(), ("ep", original.ep))}
    inside = math.prod(known.get(axis, 0) for axis in ("dp_shard", "cp", "tp"))
    fitting = []
    for values in product(*choices.values()):
        layout = replace(original, **dict(zip(choices, values, strict=True)))
        resolved = _resolved(layout, world_size, sizes)
        if resolved is not None and all(resolved.size(axis) >= least for axis in free):
            loses = original.ep > 1 and inside != original.ep and resolved.ep_shard == 1
            fitting.append((loses, sum(size > 2 for size in values), -resolved.size("dp_shard"), values, layout))
    if not fitting:
        return None
    loses, *_, layout = min(fitting, key=lambda item: item[:4])
    return loses, layout


def _smaller(size: int, most: int) -> list[int]:
    """Return the sizes that an axis may shrink to: the divisors above 1, so that what the size divides stays divisible."""
    if size == 1:
        return [1]
    few = range(2, min(size, most) + 1)
    return [part for part in divisors(size) if part in few] or list(few)


def _too_few(original: Layout, known: Mapping[str, int], least: int, world_size: int | None, legal: list[int]) -> Refusal:
    above = [f"layout.{axis}" for axis in AXES if known.get(axis, least) > 1]
    if not above:
        return Refusal("audit.processes", f"layout ({original}): nothing to compare; set an axis above 1, or dp_shard to null")
    names = f"{', '.join(above)}: {'stays' if len(above) == 1 else 'stay'} above 1"
    if legal:
        shown = ", ".join(map(str, legal))
        return Refusal(
            "audit.processes", f"--nproc={world_size}: {names}; the smallest legal --nproc is {legal[0]}, legal are {shown}"
        )
    fewest = math.prod(_smaller(known.get(axis, least), known.get(axis, least))[0] for axis in AXES)
    return Refusal(
        "audit.processes",
        f"{names}, which needs at least {fewest} processes; ask for them with --nproc, or set one of them to 1",
    )


# -- the model ------------------------------------------------------------------------------------------------------------


def _shrink_model(
    source: ModelConfig, large: "PreTrainedModel", large_config: "PretrainedConfig", spec: ParallelSpec,
    defaults: Mapping[str, Any], needs: Needs, patterns: "Patterns", changes: list[Change],
) -> tuple[ModelConfig, dict[str, Any]]:  # fmt: skip
    """Return the config of a small model of the same structure, and the run's patterns with the new numbers of layers."""
    path, count = layers_of(large, spec.layers)
    everything = list(range(count))
    stays = sum(parameter.numel() for parameter in large.parameters()) <= SMALL
    lists = lists_of(large.config.get_text_config().to_dict(), count)
    kinds: list[Any] = (
        everything if stays else kinds_of(large, path, everything, lists, marks_of_layers(patterns, large, path, count))
    )
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    idle = _idle_layers(large, spec, path, count) if needs.stages > 1 else set()
    more = [index for index in everything if index not in firsts and index not in idle]
    firsts = sorted([*firsts, *more[: max(0, max(2, needs.stages) - len({*firsts} - idle))]])
    # If the config says "every fourth layer", layers must keep their positions: then all layers up to the last kept one stay.
    # A tie needs two of the layers that it ties.
    for kept in (firsts, everything[: firsts[-1] + 1], everything[: max(firsts[-1], second_of_ties(spec, path)) + 1]):
        values, noted = small_config(source, large_config, defaults, needs, kept, count, ALWAYS if stays else RULES)
        model = source.model_copy(update={"path": None, "config": values})
        try:
            small = build_on_meta(model, pretrained_config(model))
            lost = lost_between(large, small, spec, path, kept)
        except MeshwrightError as error:
            lost = list(error.problems)
        if not lost:
            break
    else:
        raise ModelError(
            [
                Refusal("shrink.model", f"{type(large).__name__} cannot be shrunk: {line}; --full audits it as it is")
                for line in lost
            ]
        )
    changes.extend(noted)
    if len(kept) == count:
        return model, {}
    new_numbers = [kept.index(index if index in kept else kinds.index(kind)) for index, kind in enumerate(kinds)]
    return model, renumbered_patterns(patterns, large, small, path, kept, new_numbers)


def _idle_layers(model: "PreTrainedModel", spec: ParallelSpec, path: str, count: int) -> set[int]:
    """Return the numbers of the layers that do not run on text, among others that do: no stage is made of them."""
    # A forward may leave its state on modules, and kinds of layers are compared by what is on them.
    runs = spec.traces(copy.deepcopy(model)).runs if spec.traces is not None else {}
    idle = {index for index in range(count) if not any(runs.get(f"{path}.{index}", (1, 1)))}
    return idle if len(idle) < count else set()


# -- patterns with numbers of layers --------------------------------------------------------------------------------------
