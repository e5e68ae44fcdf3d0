"""Cases of the objectives that Meshwright brings: an axis against one process, and that against a plain computation."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from maintain.cells import Place
from maintain.objectives import CLOSE, objective_case
from meshwright.audit.conduct import Auditor
from meshwright.audit.report import AuditReport
from meshwright.data.loader import TrainLoader
from meshwright.data.store import TokenStore
from meshwright.models.objective import Batch, Objective, RunFacts
from meshwright.objectives.call import evaluate_batch, passes_before
from meshwright.objectives.documents import number_documents
from meshwright.objectives.running import Running, running
from meshwright.objectives.trying.invented import spread_of
from meshwright.train.config import RunConfig
from meshwright.train.run_objective import columns_of
from tests.objectives.test_given import PLACES

__all__ = ["LORA", "PLACES", "compare", "documents_of", "facts", "gradients", "plain_step", "tiny_model"]

LORA = {"rank": 2, "targets": "all-linear"}


def compare(
    auditor: Auditor,
    folder: Path,
    place: Place,
    objective: Mapping[str, Any],
    family: str = "llama",
    *,
    plants: Sequence[Callable[..., None]] = (),
    **options: Any,
) -> AuditReport:
    """Audit an objective on a layout (:func:`~maintain.objectives.objective_case`). With a plant, the audit fails."""
    case = objective_case(folder, place, objective, family, **options)
    report = auditor.audit(case, place.world_size, plants=list(plants))
    assert report.passed == (not plants), report.verdict
    assert plants or report.worst_gradient < CLOSE
    return report


def tiny_model(seed: int = 0, **changes: Any) -> nn.Module:
    """A causal language model in fp64."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    torch.manual_seed(seed)
    config = AutoConfig.for_model("llama", num_key_value_heads=1, **{**sizes, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()


def plain_step(
    objective: Objective, model: nn.Module, store: TokenStore, config: RunConfig, microbatches: int, more: Any = None
) -> tuple[torch.Tensor, Mapping[str, float]]:
    """Return the loss of a step of one process, whose gradients the model has, and the metrics of the objective.

    Args:
        objective: the objective, which has begun.
        model: the model.
        store: the documents; one epoch is the step.
        config: packing, length and columns.
        microbatches: number of microbatches.
        more: returns further tensors of a batch of whole sequences.
    """
    data, columns = config.data, columns_of(config)
    sizes = {"sequence_length": data.sequence_length, "packing": data.packing, "seed": 0, "shuffle": False}
    sequences = TrainLoader(store, global_batch_size=1, microbatch_size=1, **sizes).sequences(1)
    each = -(-sequences // microbatches)
    loader = TrainLoader(store, global_batch_size=1, microbatch_size=1, **sizes)
    rows = [loader.microbatches(step)[0] for step in range(sequences)]
    groups = [rows[begin : begin + each] for begin in range(0, sequences, each)]
    batches: list[Batch] = []
    for group in groups:
        batch = {name: torch.cat([row[name] for row in group]) for name in group[0]}
        batch.update(more(batch) if more else {})
        batches.append({**batch, **number_documents(batch, spread=spread_of(columns))})
    counts = torch.tensor(objective.counts(batches))
    for one in passes_before(objective):
        assert one.adapted
        with running(Running()), torch.no_grad():
            one.add(batches, [one.values(model, batch) for batch in batches], lambda sums: sums)
    total, measured = torch.zeros((), dtype=torch.float64), dict[str, list[float]]()
    for batch in batches:
        terms, metrics = evaluate_batch(objective, model, batch, Running(wanted=frozenset({"log_probs"})))
        loss = objective.combine(terms, counts) / counts[0]
        loss.backward()
        total = total + loss.detach()
        for name, pair in metrics.items():
            known = measured.setdefault(name, [0.0, 0.0])
            measured[name] = [old + float(new) for old, new in zip(known, pair, strict=True)]
    return total, {name: value / max(count, 1) for name, (value, count) in measured.items()}


def facts(config: RunConfig, *, adapter: bool = False) -> RunFacts:
    """What an objective is told of a run."""
    data = config.data
    return RunFacts(0, data.sequence_length, data.packing, None, False, set(), columns_of(config), adapter)


def documents_of(store: TokenStore) -> Sequence[tuple[list[int], list[int], dict[str, Any]]]:
    """Return the tokens of both members of each pair (the second may be empty), and the values of the pair."""
    found = []
    for number, (begin, end) in enumerate(zip(store.offsets, store.offsets[1:], strict=False)):
        middle = end if store.seconds is None else begin + store.seconds[number]
        tokens = [int(token) for token in store.tokens[begin:end]]
        cut = int(middle - begin)
        values = {
            name: one[number] if store.tensors[name].per == "document" else one[begin:end] for name, one in store.values.items()
        }
        found.append((tokens[:cut], tokens[cut:], values))
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of a model, and remove them."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found
