"""The reference: the same step of the plain model in one process.

It has no FSDP units, no mesh of more than one rank, no sync policy, no recomputation and no offload. Mixed precision is
implemented here once more, in plain torch.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils._pytree import tree_map

from meshwright.audit.again import evaluate
from meshwright.audit.borders import MOST_BYTES_OF_BORDERS, BorderRecorder
from meshwright.audit.case import AuditTrainer, Case, NotingRunner, modules_in_evaluation
from meshwright.audit.causes.callback_notes import notes_of
from meshwright.audit.data import UnevenLoader, gathered_batches
from meshwright.audit.one_process.decay import decayed_by_optimizer, plain_optimizer, to_be_decayed
from meshwright.audit.one_process.model_files import write_files
from meshwright.audit.timeline import Moment, Sketch, sketch
from meshwright.checkpoint import state
from meshwright.distributed.conductor import PERFORMERS
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.update.grad_clip import total_grad_norm
from meshwright.models.token_loss import count_tokens
from meshwright.plan.axes.context.sharing import attention_program
from meshwright.plan.given.inspection import model_sizes
from meshwright.plan.result.border_places import borders
from meshwright.plan.result.sharding_plan import ShardingPlan, UnitRow
from meshwright.train.engine.runner import Batch, Sums
from meshwright.train.parts import RankSetup

__all__ = ["LOSS", "Reference", "ReferenceTrainer", "plain_model", "record_reference"]

LOSS = "the loss"
"""Key of the loss, among keys that are names of parameters."""

MOST_BYTES_OF_PARTS = 2**30
"""The gradient of each microbatch is kept separately if all of them together have at most this many bytes."""


class Reference:
    """What one process computed, read from disk tensor by tensor.

    Attributes:
        losses: loss of each step.
        norms: norm of the gradient in each step, before clipping.
        clipped_norm: norm of the gradient in the first step, after clipping.
        clip_norm: the limit of clipping in all steps, lowered so that it takes effect in the first; ``None``: no clipping.
        microbatch_losses: loss of each microbatch of the first step, a sum over tokens that is not divided by anything.
        microbatch_tokens: number of valid tokens of each microbatch of the first step.
        sequences: for each step, the digests of its sequences.
        largest_gradient: largest entry of all gradients of the first step.
        evaluating: names of the modules that were in evaluation mode in the first step.
        boundaries: number of documents of the first step that begin within a sequence.
        decayed: names of the parameters that the words of the configuration apply weight decay to.
        idle_experts: how often, in the first step, an expert of a layer got no token of a microbatch.
        experts: number of combinations of expert, layer and microbatch that ``idle_experts`` is out of; 0 for a dense model.
        words: number of token ids (edges of slices of the vocabulary, and padding) that were to be fed in the first step.
        words_fed: number of them that were fed, as inputs and as labels.
        unlabelled_step: step that has a microbatch without a valid token, counted from 0; ``None``: no step has.
        borders_left_out: number of tensors at borders that were not kept, because there were too many.
        evaluation: loss of an evaluation after the steps; ``None``: there was none.
        sketches: for each step, moment to name to the sketch of a trained parameter. The first step has no gradients: their
            tensors are kept.
        callbacks: the gradients that callbacks changed.
    """

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / "reference.json").read_text())
        self.losses: list[float] = meta["losses"]
        self.norms: list[float] = meta["norms"]
        self.clipped_norm: float = meta["clipped_norm"]
        self.clip_norm: float | None = meta["clip_norm"]
        self.microbatch_losses: list[float] = meta["microbatch_losses"]
        self.microbatch_tokens: list[int] = meta["microbatch_tokens"]
        self.sequences: list[list[str]] = meta["sequences"]
        self.largest_gradient: float = meta["largest_gradient"]
        self.boundaries: int = meta["boundaries"]
        self.evaluating: list[str] = meta["evaluating"]
        self.decayed: list[str] = meta["decayed"]
        self.idle_experts: int = meta["idle_experts"]
        self.experts: int = meta["experts"]
        self.words: int = meta["words"]
        self.words_fed: int = meta["words_fed"]
        self.unlabelled_step: int | None = meta["unlabelled_step"]
        self.borders_left_out: int = meta["borders_left_out"]
        self.evaluation: float | None = meta["evaluation"]
        self.sketches: list[dict[str, dict[str, Sketch]]] = meta["sketches"]
        self.callbacks: list[tuple[int, str, dict[str, Sketch]]] = meta["callbacks"]
        self._file = safe_open(folder / "reference.safetensors", framework="pt")
        self._names = set(self._file.keys())

    def names(self, kind: str) -> list[str]:
        """Return the names of the tensors of a kind, such as ``optimizer`` or ``buffer``, as in their keys."""
        return sorted(key.removeprefix(f"{kind}.") for key in self._names if key.startswith(f"{kind}."))

    def get(self, key: str) -> torch.Tensor | None:
        """Return a tensor by its key, or ``None`` if there is none.

        Keys are ``initial.NAME``, ``gradient.NAME``, ``part.I.NAME``, ``final.NAME``, ``optimizer.NAME.STATE``,
        ``buffer.NAME``, ``buffer_after.STEP.NAME`` and ``border.I.POINT``. I is the index of a microbatch.
        """
        return self._file.get_tensor(key) if key in self._names else None

    def parts(self, name: str) -> list[torch.Tensor]:
        """Return the gradient of each microbatch for a parameter; empty if they were not kept."""
        parts = [self.get(f"part.{index}.{name}") for index in range(len(self.microbatch_losses))]
        return [part for part in parts if part is not None] if all(part is not None for part in parts) else []


class ReferenceRunner(NotingRunner):
    """Runs one microbatch after another. In the first step, it also keeps the gradient of each microbatch separately."""

    trainer: "ReferenceTrainer"

    def forward_backward(self, batches: list[Batch], counts: torch.Tensor) -> Sums:
        """Run the microbatches of a step. The gradient is their sum, as in a run."""
        trainer = self.trainer
        trainer.note_sequences(batches)
        if trainer.objective.gathers and trainer.readers:
            batches = gathered_batches(batches, trainer.readers)
        trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        if trainer.step > 0:
            sums = super().forward_backward(batches, counts)
            gradients = {name: sketch(p.grad) for name, p in trained.items() if p.grad is not None}
            trainer.meta["sketches"].append({Moment.GRADIENT: gradients})
            return sums
        total = Sums()
        trainer.note(batches)
        for index, batch in enumerate(batches):
            before = {name: parameter.grad for name, parameter in trained.items()}
            for parameter in trained.values():
                parameter.grad = None
            sums = super().forward_backward([batch], counts)
            for name, value in sums.values.items():
                if name in trainer.balance.losses():  # these already include the microbatches before
                    total.values[name] = value
                else:
                    total.add(name, value)
            trainer.meta["microbatch_losses"].append(float(sums.values["loss"]) * float(counts[0].clamp(min=1)))
            trainer.meta["microbatch_tokens"].append(count_tokens([batch]))
            for name, parameter in trained.items():
                if parameter.grad is not None and trainer.keeps_parts:
                    trainer.keep(f"part.{index}.{name}", parameter.grad)
                if (sofar := before[name]) is not None:
                    parameter.grad = sofar if parameter.grad is None else sofar + parameter.grad
        for name, parameter in trained.items():
            if parameter.grad is not None:
                trainer.keep(f"gradient.{name}", parameter.grad)
        return total


class ReferenceTrainer(AuditTrainer):
    """Trains the plain model in one process, and keeps what it computes.

    Args:
        case: the case.
        device: the device to compute on.
        readers: number of data ranks of the layouts that are compared with this reference. The borders of the first microbatch
            of each data rank are recorded. 0: no borders are recorded.
        files: folder for the model as files, with its first values; ``None``: none are written.
    """

    def __init__(self, case: Case, device: torch.device, readers: int = 0, files: Path | None = None) -> None:
        self.readers, self.files = readers, files
        self.tensors: dict[str, torch.Tensor] = {}
        self.meta: dict[str, Any] = {"microbatch_losses": [], "microbatch_tokens": [], "losses": [], "norms": []}
        self.meta["sketches"] = [{}]
        super().__init__(
            case,
            device,
            ReferenceRunner,
            None if files is None else lambda model: write_files(model, case.config.adapter, files),
            distribute=plain_model,
            optimizer=self._plain_optimizer,
            sync=lambda run, model: GradSync(model),  # there is nothing to sync
        )
        copies = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        self.keeps_parts = copies * self.loader.accumulation <= MOST_BYTES_OF_PARTS

    def _plain_optimizer(self, run: RankSetup, model: nn.Module) -> torch.optim.Optimizer:
        """Build AdamW. Which parameters it decays is derived here once more, and not read from the plan."""
        experts = model_sizes(run.setup.spec, run.setup.model).experts or 0
        settings = run.config.optimizer
        return plain_optimizer(model, settings, to_be_decayed(model, experts, settings.no_decay, settings.decay), experts)

    def note(self, batches: list[Batch]) -> None:
        """Record facts of the first step that are not results: modules in evaluation, documents, token ids that were fed."""
        loader = self.loader
        assert isinstance(loader, UnevenLoader)
        self.meta["evaluating"] = modules_in_evaluation(self.model)
        self.meta["boundaries"] = sum(int((batch["position_ids"][:, 1:] == 0).sum()) for batch in batches)
        inputs, labels = ({int(i) for batch in batches for i in batch[key].unique()} for key in ("input_ids", "labels"))
        self.meta["words"], self.meta["words_fed"] = len(loader.words), len(inputs & labels & set(loader.words))
        begin = loader.unlabelled.start if loader.unlabelled else None
        self.meta["unlabelled_step"] = None if begin is None else begin // loader.global_batch_size

    def clip(self) -> torch.Tensor:
        """Clip the gradient. If the run clips, the first step lowers the limit so that it takes effect; later steps keep it."""
        limit = self.config.training.clip_norm
        if self.step == 0 and limit is not None:
            limit = min(limit, float(total_grad_norm(self.model.parameters())) / 2)
            training = self.config.training.model_copy(update={"clip_norm": limit})
            self.config = self.config.model_copy(update={"training": training})
        norm = super().clip()
        if self.step == 0:
            self.meta["clipped_norm"] = float(total_grad_norm(self.model.parameters()))
            self.meta["clip_norm"] = limit
        return norm

    def keep(self, key: str, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor as it is now."""
        self.tensors[key] = tensor.detach().cpu().clone().contiguous()

    def _idle(self, key: str, gradient: torch.Tensor) -> list[bool]:
        """For a matrix of all experts of a layer, return which got no gradient from a microbatch; otherwise an empty list."""
        experts = model_sizes(self.setup.spec, self.setup.model).experts
        if not experts or gradient.ndim != 3 or len(gradient) != experts or not key.endswith("down_proj"):
            return []
        return (gradient == 0).flatten(1).all(dim=1).tolist()

    def _border_recorder(self) -> BorderRecorder:
        microbatches = range(0, self.loader.accumulation, self.loader.accumulation // self.readers) if self.readers else ()
        names = borders(self.setup.plan, self.model) if self.readers and not self.objective.gathers else ()
        return BorderRecorder(self.model, names, microbatches, MOST_BYTES_OF_BORDERS // max(1, self.readers))

    def record(self, folder: Path) -> None:
        """Run all steps, and write what they computed."""
        for name, parameter in self.model.named_parameters():
            self.keep(f"initial.{name}", parameter)
        recorder = self._border_recorder()
        while self.step < self.case.steps:
            self.train_step()
            self.step += 1
            metrics = self.metrics()
            self.meta["losses"].append(metrics["loss"])
            self.meta["norms"].append(metrics["gradient_norm"])
            recorder.close()
            values = {name: sketch(p) for name, p in self.model.named_parameters() if p.requires_grad}
            self.meta["sketches"][-1][Moment.PARAMETER] = values
            for name, buffer in self.model.named_buffers():
                self.keep(f"buffer_after.{self.step}.{name}", buffer)
        for number, recorded in recorder.tensors.items():
            self.tensors.update({f"border.{number}.{point}": tensor for point, tensor in recorded.items()})
        self.meta["borders_left_out"] = recorder.left_out
        for name, parameter in self.model.named_parameters():
            self.keep(f"final.{name}", parameter)
        for name, buffer in self.model.named_buffers():
            self.keep(f"buffer.{name}", buffer)
        for key, value in state.optimizer_tensors(self.model, self.optimizer).items():
            self.keep(key, value)
        self.meta["sequences"] = self.sequences
        self.meta["callbacks"] = notes_of(self).gradients
        self.meta["evaluation"] = None if self.files is None else evaluate(self)
        self.meta["decayed"] = decayed_by_optimizer(self.model, self.optimizer)
        gradients = [tensor for key, tensor in self.tensors.items() if key.startswith("gradient.")]
        self.meta["largest_gradient"] = max(float(tensor.abs().max()) for tensor in gradients if tensor.numel())
        idle = [zeros for key, tensor in self.tensors.items() if key.startswith("part.") for zeros in self._idle(key, tensor)]
        self.meta["experts"], self.meta["idle_experts"] = len(idle), sum(idle)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, folder / "reference.safetensors")
        (folder / "reference.json").write_text(json.dumps(self.meta))


def record_reference(device: torch.device, case: Case, folder: Path, readers: int, whole: bool = False) -> None:
    """Compute the reference of a case, for layouts with ``readers`` data ranks, and write it. Job of the one process.

    Args:
        device: the device to compute on.
        case: the case.
        folder: folder of the reference.
        readers: number of data ranks.
        whole: also write the model as files, and evaluate.
    """
    ReferenceTrainer(case.on_one_process(), device, readers, folder if whole else None).record(folder)


# -- the plain model, and the mixed precision of the plan ---------------------------------------------------------------------


def plain_model(run: RankSetup) -> nn.Module:
    """Return the model of a run, with only the trainability of the parameters and the dtypes set as in the plan."""
    model, plan = run.setup.model, run.plan
    for row in plan.parameters:
        model.get_parameter(row.name).requires_grad_(row.trainable)
    for action in attention_program(plan):  # only of a family whose own attention lets packed documents see each other
        PERFORMERS[type(action)](model, action, run.mesh)
    _compute_in_dtypes(model, plan)
    return model


def _compute_in_dtypes(model: nn.Module, plan: ShardingPlan) -> None:
    """Make the model compute with copies of its parameters in the dtypes of their units, and cast the inputs of units.

    Gradients have the dtype of the stored parameters. Every unit casts its floating-point inputs and outputs, as FSDP2's mixed
    precision does.
    """
    wanted = {name: plan.unit(row.unit).param_dtype for row in plan.parameters for name in (row.name, *row.aliases)}
    places = [
        (module, own, f"{prefix}.{own}" if prefix else own)
        for prefix, module in model.named_modules()
        for own, _ in module.named_parameters(recurse=False)
    ]
    stored: list[tuple[nn.Module, str, nn.Parameter]] = []

    def swap_in(*_: Any) -> None:
        copies: dict[int, torch.Tensor] = {}  # a tied parameter is cast once
        for module, own, name in places:
            parameter = module._parameters[own]
            assert parameter is not None
            stored.append((module, own, parameter))
            if (dtype := wanted[name]) is not None:
                copy = copies.setdefault(id(parameter), parameter.to(getattr(torch, dtype)))
                module._parameters[own] = copy

    def swap_out(*_: Any) -> None:
        for module, own, parameter in stored:
            module._parameters[own] = parameter
        stored.clear()

    model.register_forward_pre_hook(swap_in)
    model.register_forward_hook(swap_out, always_call=True)
    for unit in plan.units:
        _cast_at_borders(model.get_submodule(unit.name), unit)


def _cast_at_borders(module: nn.Module, unit: UnitRow) -> None:
    def cast(dtype: str) -> Any:
        target = getattr(torch, dtype)
        return lambda item: item.to(target) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    if (entering := unit.param_dtype) is not None:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (tree_map(cast(entering), args), tree_map(cast(entering), kwargs)), with_kwargs=True
        )
    if (leaving := unit.output_dtype) is not None:
        module.register_forward_hook(lambda _, args, output: tree_map(cast(leaving), output))
