"""FSDP2Manager: sizes and policies in one object, which builds the mesh and shards a model with the model's strategy."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from meshwright.device import backend, default_kind, kind_of_backend
from meshwright.distributed import _torch_compat
from meshwright.distributed.data.fsdp_units import refuse_parallelized
from meshwright.distributed.memory.activation_checkpointing import recompute
from meshwright.distributed.mesh import ParallelMesh, build_mesh, mesh_of
from meshwright.distributed.slices import assign
from meshwright.errors import LayoutError, MissingPlanError, Refusal
from meshwright.layout import Layout
from meshwright.models.specs.registry import get_parallelization_strategy, spec_of
from meshwright.models.specs.strategy import ParallelizationStrategy, Request, requested
from meshwright.nemo.accumulation import give_no_sync
from meshwright.nemo.choices import choices_of
from meshwright.nemo.functions import fsdp2_strategy_parallelize
from meshwright.nemo.tp_plans import _get_parallel_plan
from meshwright.plan.axes.tensor.given_styles import declared_styles
from meshwright.plan.given.closed_choices import ActivationCheckpointing, SyncPolicy
from meshwright.plan.given.inspection import inspect_model
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve
from meshwright.plan.result.program import Assign, Recompute
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["FSDP2Manager"]

_BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16, cast_forward_inputs=True)


@dataclass
class FSDP2Manager:
    """Shards models over the ranks of the default process group, through :func:`fsdp2_strategy_parallelize`.

    Unlike in Meshwright's own trainer, gradients are averaged over the data ranks. This is torch's default, and right
    for a loop whose loss is a mean on every rank. If there is only one process, nothing is set up.

    Later versions of NeMo AutoModel pass a configuration object and meshes: ``FSDP2Manager(config, device_mesh=mesh)``. The
    fields of this object with the names below are used (``tp_plan`` is ``custom_tp_plan``).

    Args:
        dp_size: total number of data ranks; ``None``: what the other sizes leave of the world.
        dp_replicate_size: number of replicas among them (HSDP).
        tp_size: number of tensor parallel ranks.
        cp_size: number of context parallel ranks.
        pp_size: number of pipeline stages.
        ep_size: number of expert parallel ranks.
        sequence_parallel: with ``tp``, each rank has only its slice of the sequence between attention and MLP. ``tp`` must
            divide the length of every sequence.
        use_hf_tp_plan: use the tensor parallel plan that the model of transformers declares, and leave logits sharded.
        custom_tp_plan: tensor parallel styles that win over all others: a dict of module patterns to styles (of torch, or
            names), or the import path of such a dict or of a function that returns one.
        mp_policy: dtypes. By default all are bf16, as in NeMo AutoModel; ``None``: see :func:`fsdp2_strategy_parallelize`.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards in host memory.
        backend: backend of the process group, if it has to be started here; ``nccl`` or ``gloo`` also selects the kind of
            device. ``None``: gloo, and NCCL for tensors on a GPU if there is one.
        world_size: total number of processes; ``None``: the existing ones.
        activation_checkpointing: what is recomputed of each layer in backward; ``True``: everything (``full``).
        defer_fsdp_grad_sync: reduce gradients only in the last microbatch of a step (it sets the default policy of
            :class:`~meshwright.distributed.data.grad_sync.GradSync`).
        device_mesh: a mesh with axes ``(pp, dp_replicate, dp_shard, cp, tp)``, instead of the sizes; filled on construction.
        moe_mesh: a mesh with axes ``(pp, ep_shard, ep)``, and with replicas ``dp_replicate`` after ``pp``, instead of
            ``ep_size``; filled on construction if there are expert parallel ranks.
        loss_parallel: with ``tp``, the model returns its logits as a DTensor that is sharded over the vocabulary, for
            :func:`~meshwright.distributed.tensor.loss_parallel.cross_entropy_sum`, or for torch's ``loss_parallel()``, inside
            which backward has to run too. ``None``: only if the given plan leaves the logits of the output head sharded.

    Attributes:
        dp_shard_size: number of data ranks that parameters are sharded over. ``None`` if there is one process; then the meshes
            are ``None`` too.
        ep_shard_size: number of ranks that the parameters of an expert are sharded over.
        mesh: the mesh of the layout.
        plan: the plan of the last :meth:`parallelize`; ``None`` if a strategy of the user did it without a plan.

    Raises:
        LayoutError: sizes that do not fit the world size, or each other.
        UnsupportedError: an axis or option that is not supported.
    """

    dp_size: Any = None
    dp_replicate_size: int | None = 1
    tp_size: int | None = 1
    cp_size: int | None = 1
    pp_size: int | None = 1
    ep_size: int | None = 1
    sequence_parallel: bool = False
    use_hf_tp_plan: bool = False
    custom_tp_plan: Mapping[str, Any] | str | None = None
    mp_policy: MixedPrecisionPolicy | None = _BFLOAT16
    offload_policy: OffloadPolicy | None = None
    backend: str | None = None
    world_size: int | None = None
    activation_checkpointing: bool | str | ActivationCheckpointing = False
    defer_fsdp_grad_sync: bool = True
    _: KW_ONLY
    config: Any = None
    device_mesh: DeviceMesh | None = None
    moe_mesh: DeviceMesh | None = None
    loss_parallel: bool | None = None
    dp_shard_size: int | None = field(init=False, default=None)
    ep_shard_size: int | None = field(init=False, default=None)
    mesh: ParallelMesh | None = field(init=False, default=None)
    plan: ShardingPlan | None = field(init=False, default=None)
    _adopted: tuple[DeviceMesh, DeviceMesh | None] | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read a configuration object, if one is given, and set everything up with :meth:`_setup_distributed`."""
        if self.dp_size is not None and not isinstance(self.dp_size, int):
            self.config, self.dp_size = self.dp_size, None
        for name in ("dp_replicate_size", "tp_size"):  # FSDP2Manager(config, device_mesh, moe_mesh)
            if isinstance(mesh := getattr(self, name), DeviceMesh):
                setattr(self, name, 1)
                setattr(self, "device_mesh" if self.device_mesh is None else "moe_mesh", mesh)
        if self.config is not None:
            config, self.config = self.config, None
            for name, value in choices_of(config, _CHOICES).items():
                setattr(self, name, value)
            if self.device_mesh is None and _processes() > 1:
                raise LayoutError(
                    "manager.mesh", "FSDP2Manager(config): needs device_mesh, the mesh that the configuration is for"
                )
        self._setup_distributed()
        self._adopt()  # of an override that builds its mesh itself

    # The steps below are those of NeMo AutoModel's manager. A subclass may override each of them.

    def _setup_distributed(self) -> None:
        """Check the sizes, and build the meshes. Start the process group if there is none and torchrun's variables are set."""
        if self._count_processes() == 1:
            sizes = {name: getattr(self, name) for name in _SIZES if (getattr(self, name) or 1) > 1}
            if sizes:
                shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
                warnings.warn(f"FSDP2Manager({shown}): there is one process, so nothing is set up", stacklevel=4)
            return
        if not dist.is_initialized():
            _torch_compat.mend_gloo()
            dist.init_process_group(self.backend or backend(default_kind()))
        if self.device_mesh is None:
            made = self._get_device_mesh()
            self.device_mesh = self.device_mesh if made is None else made  # a step of the user may set it and return nothing
            if not isinstance(self.device_mesh, DeviceMesh):
                raise LayoutError(
                    "manager.mesh", f"{type(self).__name__}._get_device_mesh(): returned {made!r}; legal is a DeviceMesh"
                )
        if self.moe_mesh is None:
            experts = self._get_moe_mesh()
            self.moe_mesh = self.moe_mesh if experts is None else experts
            if not isinstance(self.moe_mesh, DeviceMesh | None):
                raise LayoutError(
                    "manager.mesh",
                    f"{type(self).__name__}._get_moe_mesh(): returned {experts!r}; legal are a DeviceMesh and None",
                )
        self._adopt()

    def _get_device_mesh(self) -> DeviceMesh:
        """Build the mesh with axes ``(pp, dp_replicate, dp_shard, cp, tp)`` from the sizes."""
        layout = self._layout().resolve(_processes())
        self.mesh = build_mesh(layout, kind_of_backend(self.backend))
        return self.mesh.root

    def _get_moe_mesh(self) -> DeviceMesh | None:
        """Return the mesh of experts that belongs to ``device_mesh``; ``None``: there are no expert parallel ranks."""
        return None if self.mesh is None else self.mesh.experts

    def _count_processes(self) -> int:
        processes = _processes()
        if self.world_size not in (None, processes):
            raise LayoutError(
                "layout.world_size",
                f"world_size={self.world_size}: there are {processes} processes; legal are {processes} and None",
            )
        self.world_size = processes
        return processes

    def _adopt(self) -> None:
        """Take the mesh of the layout and the sizes from ``device_mesh`` and ``moe_mesh``, if they are new.

        Raises:
            LayoutError: there are several processes and no mesh; or the meshes do not fit the sizes, or each other.
        """
        processes = self._count_processes()
        if processes == 1:
            return
        if self.device_mesh is None:
            raise LayoutError(
                "manager.mesh",
                f"{type(self).__name__}: there are {processes} processes and no mesh; _setup_distributed() has to set "
                "self.device_mesh",
            )
        if self._adopted is not None and self.device_mesh is self._adopted[0] and self.moe_mesh is self._adopted[1]:
            return
        if self.mesh is None or self.mesh.root is not self.device_mesh or self.moe_mesh not in (None, self.mesh.experts):
            mesh = mesh_of(self.device_mesh, self.moe_mesh)
            self._check_sizes(mesh.layout)
            self.mesh = mesh
        self._fill(self.mesh)
        self._adopted = self.device_mesh, self.moe_mesh

    def _check_sizes(self, layout: Layout) -> None:
        """Refuse sizes that differ from those of a given mesh. A size of 1 is the default of most, so it is not checked."""
        sizes = {"dp_size": "dp", "ep_size": "ep", **{f"{axis}_size": axis for axis in layout.sizes()}}
        sizes_given = {name: getattr(self, name) for name in _SIZES}
        problems = [
            Refusal(
                "manager.mesh",
                f"{name}={sizes_given[name]}: device_mesh has {layout.size(axis)}; leave the size out, or the mesh",
            )
            for name, axis in sizes.items()
            if name in sizes_given and sizes_given[name] not in (None, 1, layout.size(axis))
        ]
        if problems:
            raise LayoutError(problems)

    def _layout(self) -> Layout:
        def size(value: int | None) -> int:
            return 1 if value is None or value <= 0 else value

        replicas = size(self.dp_replicate_size)
        shard = None
        if self.dp_size is not None and self.dp_size > 0:
            if self.dp_size % replicas:
                raise LayoutError(
                    "layout.ranks",
                    f"dp_replicate_size={replicas}: must divide dp_size={self.dp_size}; legal are divisors of {self.dp_size}",
                )
            shard = self.dp_size // replicas
        return Layout(
            pp=size(self.pp_size),
            dp_replicate=replicas,
            dp_shard=shard,
            cp=size(self.cp_size),
            tp=size(self.tp_size),
            ep=size(self.ep_size),
        )

    def _fill(self, mesh: ParallelMesh) -> None:
        layout = mesh.layout
        sizes = layout.sizes()
        self.pp_size, self.dp_replicate_size, self.dp_shard_size, self.cp_size, self.tp_size = sizes.values()
        self.dp_size, self.ep_size = layout.size("dp"), layout.ep
        self.ep_shard_size = layout.ep_shard if layout.ep > 1 else layout.size("dp_cp")  # as in NeMo AutoModel
        self.device_mesh, self.moe_mesh = mesh.root, mesh.experts
        if mesh.experts is not None and layout.size("dp_replicate") == 1:
            self.moe_mesh = mesh.experts["pp", "ep_shard", "ep"]

    def parallelize(self, model: nn.Module, spec: ParallelSpec | None = None) -> nn.Module:
        """Shard a model with its strategy, in place. If there is one process, only layers are recomputed, if that is chosen.

        Args:
            model: the model, on the meta device, or materialized with the same values on all ranks. With ``pp_size`` above 1, a
                stage that the caller has cut, which is parallelized over the ranks of its stage; call this for each stage of
                a rank. :class:`meshwright.Pipeline` cuts a whole model.
            spec: the spec of its family; ``None``: that of the model's strategy.

        Returns:
            What the strategy returns, with a method ``no_sync()`` for a loop that accumulates gradients.

        Raises:
            LayoutError: there are several processes and no mesh.
            PlanError: the plan does not fit the model, or the model is parallelized already.
        """
        self._adopt()
        if self.mesh is None or self.device_mesh is None:
            if self.activation_checkpointing:
                self._recompute(model, spec)
            return give_no_sync(model)
        refuse_parallelized(model)
        strategy = get_parallelization_strategy(model)
        styles, made_styles = self.custom_tp_plan, None
        if styles is None and self.use_hf_tp_plan and self.mesh.layout.tp != 1:
            styles = declared_styles(spec or spec_of(model))
        if type(strategy).parallelize is not ParallelizationStrategy.parallelize and self.mesh.layout.tp != 1:
            styles, made_styles = self._styles_of_torch(model)
        sync = SyncPolicy.RESHARD_EACH if self.defer_fsdp_grad_sync else SyncPolicy.REDUCE_EACH
        request = Request(self.mesh, spec, {"sync": sync, "loss_parallel": self.loss_parallel}, made_styles)
        with requested(request):
            parallelized = fsdp2_strategy_parallelize(
                model,
                device_mesh=self.device_mesh,
                mp_policy=self.mp_policy,
                offload_policy=self.offload_policy,
                sequence_parallel=self.sequence_parallel,
                activation_checkpointing=self.activation_checkpointing,  # type: ignore[arg-type]
                tp_shard_plan=styles,
            )
        self.plan = request.plan if request.model is model else None
        return give_no_sync(parallelized, self.plan)

    def _styles_of_torch(self, model: nn.Module) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the plan that NeMo AutoModel passes to a strategy, in styles of torch.

        And, if the user asked for none, the same plan again; otherwise ``None``.
        """
        asked = {"sequence_parallel": self.sequence_parallel, "use_hf_tp_plan": self.use_hf_tp_plan}
        try:
            styles = _get_parallel_plan(model, tp_shard_plan=self.custom_tp_plan, **asked)
        except MissingPlanError:  # the strategy may have one
            return None, None
        return styles, None if self.custom_tp_plan is not None or self.use_hf_tp_plan else styles

    def _recompute(self, model: nn.Module, spec: ParallelSpec | None) -> None:
        spec = spec or spec_of(model)
        chosen = self.activation_checkpointing
        mode = ActivationCheckpointing.FULL if isinstance(chosen, bool) else chosen
        options = ParallelOptions(activation_checkpointing=mode)  # type: ignore[arg-type]
        for action in resolve(spec, inspect_model(spec, model), Layout().resolve(1), options).program:
            if isinstance(action, Assign):
                assign(model, action)
            elif isinstance(action, Recompute):
                recompute(model, action)


def _processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


_SIZES = ("dp_size", "dp_replicate_size", "tp_size", "cp_size", "pp_size", "ep_size")
_CHOICES = {
    **{
        name: name
        for name in (
            "sequence_parallel",
            "use_hf_tp_plan",
            "custom_tp_plan",
            "mp_policy",
            "offload_policy",
            "backend",
            "activation_checkpointing",
            "defer_fsdp_grad_sync",
        )
    },
    "tp_plan": "custom_tp_plan",
}
"""Field of a configuration to the field of the manager."""
