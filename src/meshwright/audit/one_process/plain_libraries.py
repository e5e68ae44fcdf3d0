"""A second reference, which shares no code with the first: plain transformers, plain peft and plain ``torch.optim``.

What one process of Meshwright and many ranks share cannot be found by comparing them: the shift of labels, the positions of
packed documents, the scale of an adapter, the blocks of 4 bits. So one process trains a step on some documents as a run would,
packed and with Meshwright's loss. A second time, each document goes alone through the plain model, with the loss that
transformers computes from unshifted labels; frozen matrices are decoded by the lines below. The loss, the gradients and the
update have to agree.

transformers computes its loss in fp32, so the two agree to about 1e-6 and not to the last bit.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from meshwright.audit.case import AuditTrainer, Case, NotingRunner, in_dtype, silence_dropout
from meshwright.audit.causes.findings import Finding, Kind, listed
from meshwright.audit.compare import compare
from meshwright.audit.one_process.decay import plain_optimizer, to_be_decayed
from meshwright.audit.one_process.model_files import ADAPTER, MODEL, from_files, unwritten
from meshwright.audit.one_process.reference import plain_model
from meshwright.data.loader import TrainLoader
from meshwright.data.packing import SequenceDataset
from meshwright.data.preparation import write_documents
from meshwright.data.rows.columns import ROUTED_EXPERTS
from meshwright.data.store import TokenStore
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.errors import MeshwrightError, described
from meshwright.models.adapters.adapter_files import file_entries
from meshwright.models.families.listed import family_of
from meshwright.models.objective import NextToken
from meshwright.models.weights.bars import one_bar
from meshwright.plan.axes.tensor.styles import canonical
from meshwright.plan.given.inspection import model_sizes
from meshwright.plan.given.options import NF4
from meshwright.train.parts import RankSetup
from meshwright.train.schema.run_sections import MoEConfig

__all__ = ["PlainResult", "PlainRow", "compare_with_plain", "finding_of"]

DOCUMENTS, TOKENS = 10, 400
"""Largest number of documents that are compared, and of their tokens."""

TOLERANCE = 2e-4
"""Relative to the largest entry: far above the rounding of a loss in fp32, far below a wrong label, position or scale."""

LEAST_GRADIENT = 1e-2
"""An entry of an update is compared if its gradient is at least this share of the largest: Adam divides by its size."""

Tensors = dict[str, torch.Tensor]
Document = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]
"""Tokens, and for a chat which of them are to be learned."""


@dataclass(frozen=True)
class PlainRow:
    """A comparison with the plain model.

    Attributes:
        what: ``loss``, ``gradient`` or ``update``.
        name: the parameter; empty for the loss.
        error: largest difference of an entry, relative to the largest entry of the plain model's.
        ratio: how many times the plain model's tensor it is.
    """

    what: str
    name: str
    error: float
    ratio: float

    @property
    def passed(self) -> bool:
        """Return whether they agree."""
        return self.error <= TOLERANCE


@dataclass(frozen=True)
class PlainResult:
    """What was compared with the plain model.

    Attributes:
        problem: why nothing was compared; empty: it was.
        documents: number of documents.
        rows: the comparisons.
    """

    problem: str = ""
    documents: int = 0
    rows: tuple[PlainRow, ...] = ()


def compare_with_plain(device: torch.device, case: Case, folder: Path) -> PlainResult:
    """Train one step of a case in one process, and again with plain libraries. Job of the one process.

    Args:
        device: the device to compute on.
        case: the case.
        folder: the folder of its reference, with the model as files.
    """
    if why := unwritten(folder):
        return PlainResult(why)
    config = in_dtype(case.config, "float64", store="float64")
    changed = {
        "moe": MoEConfig(),
        "callbacks": [],
        "training": config.training.model_copy(update={"microbatch_size": 1, "steps": 1}),
    }
    case = from_files(Case(config.model_copy(update=changed), case.store, 1).on_one_process(), folder)
    documents = _documents(case.store, case.config.data.sequence_length)
    try:
        ours = _Ours(case, device, documents, folder / "plain")
    except MeshwrightError as error:
        return PlainResult(f"one process cannot read the model back: {described(error)}")
    if not isinstance(ours.objective, NextToken):
        return PlainResult(f"transformers has no loss for {ours.objective.name}; both sides share Meshwright's")
    if ROUTED_EXPERTS in config.data.values:
        return PlainResult("routers of transformers take no experts from rows; both sides share Meshwright's replay")
    if config.adapter is not None and config.optimizer.groups:
        return PlainResult("peft has other names for the parameters of an adapter than the groups of the optimizer")
    ours.train_step()
    try:
        with warnings.catch_warnings(), one_bar("reading the small model"):
            warnings.simplefilter("ignore")
            theirs = _Theirs(case, device, ours, folder)
            theirs.train_step(documents)
    except Exception as error:  # whatever a model or peft raises that does not run without Meshwright
        return PlainResult(f"the plain model does not run by itself: {type(error).__name__}: {described(error)}")
    rows = [PlainRow("loss", "", abs(ours.loss - theirs.loss) / abs(theirs.loss), ours.loss / theirs.loss)]
    return PlainResult("", len(documents), (*rows, *_rows(ours.keyed(), theirs)))


def _documents(store: Path, sequence_length: int) -> list["Document"]:
    """Return tokens and mask of the first documents that fit into a sequence, read from the files of a store as they are."""
    index = json.loads((store / "index.json").read_text())
    offsets = np.load(store / "offsets.npy")
    tokens = np.fromfile(store / "tokens.bin", dtype=index["token_dtype"]).astype(np.int64)
    mask = np.fromfile(store / "loss_mask.bin", dtype=np.bool_) if index["kind"] == "chat" else None
    found: list[Document] = []
    total = 0
    for begin, end in pairwise(offsets.tolist()):
        learned = mask is None or mask[begin + 1 : end].any()
        if 2 <= end - begin <= sequence_length and learned and (not found or total + end - begin <= TOKENS):
            found.append((tokens[begin:end], None if mask is None else mask[begin:end]))
            total += end - begin
        if len(found) == DOCUMENTS:
            break
    return found


class _Ours(AuditTrainer):
    """Trains one step on some documents, as a run in one process does: packed, with Meshwright's loss and update."""

    def __init__(self, case: Case, device: torch.device, documents: Sequence[Document], folder: Path) -> None:
        masks = [mask for _, mask in documents if mask is not None]
        written = write_documents(
            folder, [ids for ids, _ in documents], masks or None, sequence_length=case.config.data.sequence_length
        )
        whole = TokenStore(written.directory, replace(written.index, long_documents="error"))  # none is cut in two
        self.gradients: Tensors = {}
        self.before: Tensors = {}
        self.loss = math.nan
        super().__init__(
            case,
            device,
            NotingRunner,
            distribute=plain_model,
            sync=lambda run, model: GradSync(model),
            loader=lambda run, _: _in_order(run, whole),
        )

    def clip(self) -> torch.Tensor:
        """Keep gradients and parameters as they are before the update, and clip as a run does."""
        trained = {name: own for name, own in self.model.named_parameters() if own.requires_grad}
        self.gradients = {name: own.grad.clone() for name, own in trained.items() if own.grad is not None}
        self.before = {name: own.detach().clone() for name, own in trained.items()}
        return super().clip()

    def train_step(self) -> None:
        """Train the step, and read its loss."""
        super().train_step()
        self.step += 1
        self.loss = self.metrics()["loss"]

    def keyed(self) -> dict[str, tuple[torch.Tensor | None, torch.Tensor]]:
        """Return gradient and movement of each trained parameter, by its name in files of peft, or in the model."""
        found: dict[str, tuple[torch.Tensor | None, torch.Tensor]] = {}
        for entry in file_entries(self.model) if self.config.adapter is not None else ():
            gradient = self.gradients.get(entry.name)
            moved = entry.parameter.detach() - self.before[entry.name]
            found[entry.key] = (None if gradient is None else entry.to_files(gradient), entry.to_files(moved))
        if not found:
            for name, own in self.model.named_parameters():
                if own.requires_grad:
                    found[name] = (self.gradients.get(name), own.detach() - self.before[name])
        return found


def _in_order(run: RankSetup, store: TokenStore) -> TrainLoader:
    """Return the loader of all sequences of a store, in one batch."""
    data = run.config.data
    dataset = SequenceDataset(store, "train", data.sequence_length, data.packing, 0)
    return TrainLoader(
        store, sequence_length=data.sequence_length, global_batch_size=len(dataset), microbatch_size=1, packing=data.packing
    )


class _Theirs:
    """The same with plain libraries.

    Attributes:
        loss: mean loss over the documents' targets.
        gradients: gradient of each trained parameter, by its name in files of peft, or in the model.
        moved: how far each moved.
    """

    def __init__(self, case: Case, device: torch.device, ours: _Ours, folder: Path) -> None:
        config, settings = case.config, case.config.optimizer
        kept = {key: value for key in ("attn_implementation",) if (value := getattr(config.model, key)) is not None}
        auto = family_of(ours.setup.model).auto_class()
        model = auto.from_pretrained(folder / MODEL, dtype=torch.float64, experts_implementation="eager", **kept).to(device)
        packed = {canonical(row.name) for row in ours.setup.plan.parameters if row.dtype == NF4}
        for name, parameter in model.named_parameters():
            if name in packed:
                parameter.data = _four_bits(parameter.data)
        experts = model_sizes(ours.setup.spec, ours.setup.model).experts or 0
        if config.adapter is None:
            trained = {row.name for row in ours.setup.plan.parameters if row.trainable}
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in trained)
            decayed = set(to_be_decayed(model, experts, settings.no_decay, settings.decay))
        else:
            import peft

            wanted, settings_of_peft = config.adapter, peft.LoraConfig.from_pretrained(str(folder / ADAPTER))
            # The words of the configuration, and not what was written for peft, say what the adapter is.
            settings_of_peft.r, settings_of_peft.lora_alpha, settings_of_peft.lora_dropout = wanted.rank, wanted.alpha, 0.0
            settings_of_peft.use_dora, settings_of_peft.use_rslora = wanted.kind == "dora", wanted.scaling == "rs"
            model = peft.PeftModel.from_pretrained(model, str(folder / ADAPTER), config=settings_of_peft, is_trainable=True)
            model = model.double()
            decayed = {name for name, own in model.named_parameters() if own.ndim > 1}
        silence_dropout(model)
        self.model: nn.Module = model.train()
        self.parameters = {_in_files(name): own for name, own in model.named_parameters() if own.requires_grad}
        self.optimizer = plain_optimizer(model, settings, decayed, experts)
        self.limit, self.device = config.training.clip_norm, device
        self.loss = 0.0
        self.gradients: Tensors = {}
        self.moved: Tensors = {}

    def train_step(self, documents: Sequence[Document]) -> None:
        """Run each document alone, and update once."""
        targets = [ids if mask is None else np.where(mask, ids, -100) for ids, mask in documents]
        total = sum(int((labels[1:] != -100).sum()) for labels in targets)
        for (ids, _), labels in zip(documents, targets, strict=True):
            inputs, unshifted = (torch.from_numpy(item)[None].to(self.device) for item in (ids, labels))
            mean = self.model(input_ids=inputs, labels=unshifted, use_cache=False).loss
            share = mean * int((labels[1:] != -100).sum()) / total
            share.backward()
            self.loss += float(share.detach())
        self.gradients = {name: own.grad.clone() for name, own in self.parameters.items() if own.grad is not None}
        before = {name: own.detach().clone() for name, own in self.parameters.items()}
        if self.limit is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
        self.optimizer.step()
        self.moved = {name: own.detach() - before[name] for name, own in self.parameters.items()}


def _in_files(name: str) -> str:
    """Return the name of a parameter of a PeftModel in its files."""
    name = name.replace(".modules_to_save.default", "").replace(".default", "")
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of a block whose largest is 1 (QLoRA, arXiv 2305.14314, appendix E)."""


def _four_bits(weight: torch.Tensor) -> torch.Tensor:
    """Return what is left of a matrix in 4 bits: in blocks of 64, each entry becomes the nearest value times the largest."""
    blocks = weight.reshape(-1, 64)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    values = torch.tensor(NF4_VALUES, dtype=weight.dtype)
    nearest = (blocks / largest.clamp(min=1e-30)).unsqueeze(-1).sub(values).abs().argmin(dim=-1)
    return (values[nearest] * largest).reshape(weight.shape)


def _rows(ours: Mapping[str, tuple[torch.Tensor | None, torch.Tensor]], theirs: _Theirs) -> list[PlainRow]:
    largest = max((float(gradient.abs().max()) for gradient in theirs.gradients.values()), default=0.0)
    rows = []
    for name in sorted(ours.keys() | theirs.gradients.keys()):
        mine, truth = ours.get(name), theirs.gradients.get(name)
        if mine is None:
            rows.append(PlainRow("gradient", name, math.inf, 0.0))
            continue
        if truth is None:  # the plain model's loss does not depend on it
            truth = torch.zeros_like(mine[1])
        error, ratio, *_ = compare(mine[0], truth, 1e-6 * largest)
        rows.append(PlainRow("gradient", name, error, ratio))
        clear = truth.abs() > max(LEAST_GRADIENT * float(truth.abs().max()), 1e-6 * largest)
        if name in theirs.moved and bool(clear.any()):
            error, ratio, *_ = compare(mine[1][clear], theirs.moved[name][clear])
            rows.append(PlainRow("update", name, error, ratio))
    return rows


def finding_of(result: PlainResult) -> Finding | None:
    """Return what is wrong with one process of Meshwright, beside plain libraries; ``None``: nothing."""
    wrong = [row for row in result.rows if not row.passed]
    if not wrong:
        return None
    parts = [f"its loss is {row.ratio:.6g} times theirs" for row in wrong if row.what == "loss"]
    for what in ("gradient", "update"):
        if of := sorted((row for row in wrong if row.what == what), key=lambda row: -row.error):
            parts.append(
                f"the {what}s of {len(of)} parameters differ, the worst first: {listed(row.name for row in of)} (error "
                f"{of[0].error:.2g}, {of[0].ratio:.4g} times theirs)"
            )
    words = f"one process of Meshwright differs from plain libraries, on {result.documents} documents, each alone: "
    return Finding(Kind.PLAIN, words + "; ".join(parts), tuple(row.name for row in wrong if row.name))
