"""The device mesh of a layout: five axes, the flattened submeshes, the expert mesh, and the one that FSDP takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.device import default_kind
from meshwright.distributed import _torch_compat
from meshwright.errors import LayoutError
from meshwright.layout import AXES, EXPERT_AXES, FLATTENED, Layout
from meshwright.plan.result.sharding_plan import LAYER, unit_axes

__all__ = ["ParallelMesh", "adopt_mesh", "build_mesh", "mesh_beside", "mesh_of"]


@dataclass(frozen=True)
class ParallelMesh:
    """A layout, realised over the ranks of a process group.

    Attributes:
        layout: the resolved sizes.
        root: the five-axis mesh ``(pp, dp_replicate, dp_shard, cp, tp)``.
        named: the 1-D submeshes: of each axis of the root mesh, ``dp``, ``dp_shard_cp`` and ``dp_cp``. torch cuts them anew at
            each question.
        experts: the mesh ``(pp, dp_replicate, ep_shard, ep)``, or ``None`` where ``ep`` is 1.
    """

    layout: Layout
    root: DeviceMesh
    named: Mapping[str, DeviceMesh]
    experts: DeviceMesh | None = None

    @property
    def device_type(self) -> str:
        """Kind of device, as in :mod:`meshwright.device`."""
        return self.root.device_type

    def __getitem__(self, name: str) -> DeviceMesh:
        """The submesh of an axis, a flattened name, or an expert axis."""
        if name in ("ep_shard", "ep"):
            if self.experts is None:
                raise LayoutError("layout.axes", f"{name}: the layout has ep=1, so there is no expert mesh")
            return self.experts[name]
        return self.named[name]

    def fsdp(self) -> DeviceMesh:
        """The mesh that dense parameters are sharded and gradients are reduced over; where nothing is sharded, the replicas."""
        return self.submesh(unit_axes(self.layout, LAYER))

    def submesh(self, axes: Sequence[str], *, experts: bool = False) -> DeviceMesh:
        """The mesh of one or several axes; with ``experts``, of axes of the expert mesh.

        Only axes that all are native are a slice of the root mesh. Others are concatenated, each from its own mesh.
        """
        if experts:
            assert self.experts is not None
            return self.experts[tuple(axes)]
        if any(axis in FLATTENED for axis in axes):
            return _torch_compat.concatenate_meshes([self[axis] for axis in axes]) if len(axes) > 1 else self[axes[0]]
        return self.root[tuple(axes)]

    def rank(self, name: str) -> int:
        """This process's index on an axis or flattened submesh."""
        return self[name].get_local_rank()

    def sum(self, values: torch.Tensor, name: str = "dp_cp") -> torch.Tensor:
        """Sum a small tensor over a submesh, in place, and return it. Of size 1: no collective."""
        mesh = self[name]
        if mesh.size() > 1:
            dist.all_reduce(values, group=mesh.get_group())
        return values


def build_mesh(layout: Layout, device_type: str | None = None) -> ParallelMesh:
    """Build the mesh over the default process group, which must exist.

    Args:
        layout: sizes; what is ``None`` or -1 is inferred from the world size.
        device_type: kind of device; that of the machine's accelerators by default, or ``cpu``.

    Raises:
        LayoutError: if the sizes do not fit the world size, or there is no process group.
    """
    if not dist.is_initialized():
        raise LayoutError(
            "run.process_group",
            "no process group: start one first (torch.distributed.init_process_group, or `meshwright train`)",
        )
    _torch_compat.check()
    _torch_compat.mend_gloo()
    layout = layout.resolve(dist.get_world_size())
    if device_type is None:
        device_type = default_kind()
    sizes = layout.sizes()
    with _torch_compat.shared_groups():
        root = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES)
        experts = None
        if layout.ep > 1:
            experts = init_device_mesh(device_type, tuple(layout.expert_sizes().values()), mesh_dim_names=EXPERT_AXES)
        return _complete(layout, root, experts)


def _complete(layout: Layout, root: DeviceMesh, experts: DeviceMesh | None = None) -> ParallelMesh:
    flattened = {name: _torch_compat.flatten_mesh(root[parts], name) for name, parts in FLATTENED.items()}
    for mesh in (root, *flattened.values(), *([] if experts is None else [experts])):
        _torch_compat.inherit_timeout(mesh)
        _torch_compat.offer_groups(mesh)
    return ParallelMesh(layout, root, MappingProxyType({name: root[name] for name in AXES} | flattened), experts)


def adopt_mesh(
    device_mesh: DeviceMesh, replicate: str = "dp_replicate", shard: str = "dp_shard_cp", tp: str = "tp"
) -> ParallelMesh:
    """A :class:`ParallelMesh` over the ranks of a mesh that was made elsewhere. Collective over all ranks.

    A mesh with the five axes of Meshwright, such as :attr:`FSDP2Manager.device_mesh`, is used as the root mesh. For any other
    mesh, a new root mesh with new process groups is made over the same ranks.

    Args:
        device_mesh: a mesh over all ranks, whose axes have names: the five axes in their order, or any of the three below in
            any order; then other axes must have size 1.
        replicate: name of its axis of replicas.
        shard: name of its axis that parameters are sharded over.
        tp: name of its axis of tensor parallel.

    Raises:
        LayoutError: the mesh does not have all ranks, has no axis names, or has a further axis larger than 1.
    """
    names = device_mesh.mesh_dim_names or ()
    world = dist.get_world_size()
    if device_mesh.size() != world:  # its groups could not be made alike on all ranks
        raise LayoutError(
            "layout.device_mesh",
            f"device_mesh: has {device_mesh.size()} of {world} ranks; legal is a mesh over all of them, with names",
        )
    _torch_compat.mend_gloo()
    roles = (replicate, shard, tp)
    if names == AXES and roles == ("dp_replicate", "dp_shard_cp", "tp"):
        layout = Layout(**dict(zip(AXES, device_mesh.mesh.shape, strict=True)))
        with _torch_compat.shared_groups():
            return _complete(layout, device_mesh)
    # Their order in the mesh, which says which ranks are neighbours, need not be ours.
    legal = (
        f"legal here are {', '.join(map(repr, roles))} in any order and axes of size 1, or the five axes {', '.join(AXES)} in "
        "this order"
    )
    if not names:
        raise LayoutError("layout.device_mesh", f"device_mesh: its axes have no names; {legal}")
    if any(name not in roles and size > 1 for name, size in zip(names, device_mesh.mesh.shape, strict=True)):
        raise LayoutError(
            "layout.device_mesh", f"device_mesh has the axes {dict(zip(names, device_mesh.mesh.shape, strict=True))}; {legal}"
        )
    order = [names.index(role) for role in roles if role in names]
    rest = [index for index in range(len(names)) if index not in order]
    sizes = {role: device_mesh.mesh.shape[names.index(role)] if role in names else 1 for role in roles}
    layout = Layout(dp_replicate=sizes[replicate], dp_shard=sizes[shard], tp=sizes[tp])
    ranks = device_mesh.mesh.permute(*order, *rest).reshape(tuple(layout.sizes().values()))
    with _torch_compat.shared_groups():
        root = DeviceMesh(device_mesh.device_type, ranks, mesh_dim_names=AXES)
        return _complete(layout, root)


def mesh_of(device_mesh: DeviceMesh, moe_mesh: DeviceMesh | None = None) -> ParallelMesh:
    """A :class:`ParallelMesh` over the ranks of two meshes that were made elsewhere. Collective over all ranks.

    Args:
        device_mesh: see :func:`adopt_mesh`.
        moe_mesh: a mesh over the same ranks, with the axes ``ep_shard`` and ``ep``; ``None``: no expert parallel.

    Raises:
        LayoutError: see :func:`adopt_mesh`; or `moe_mesh` groups other ranks than the layout does.
    """
    mesh = adopt_mesh(device_mesh)
    if moe_mesh is None or moe_mesh["ep"].size() == 1:
        return mesh
    layout = replace(mesh.layout, ep=moe_mesh["ep"].size()).resolve(dist.get_world_size())
    for axis in ("ep", "ep_shard"):
        theirs, ours = moe_mesh[axis].mesh.tolist(), list(layout.group(axis, dist.get_rank()))
        if theirs != ours:
            raise LayoutError(
                "layout.device_mesh", f"moe_mesh: this rank's group on {axis} is {theirs}; the layout ({layout}) needs {ours}"
            )
    with _torch_compat.shared_groups():
        experts = init_device_mesh(mesh.device_type, tuple(layout.expert_sizes().values()), mesh_dim_names=EXPERT_AXES)
        return _complete(layout, mesh.root, experts)


def mesh_beside(mesh: ParallelMesh, layout: Layout) -> ParallelMesh:
    """A mesh of another layout over the same ranks, each of which has the same data and part of sequences as in the first.

    Only `pp` and `tp` are over other ranks: the ranks that share data and part are put in the order of their numbers, `tp`
    innermost. Collective over all ranks.

    Args:
        mesh: the mesh.
        layout: a resolved layout with as many data ranks and as large a `cp`. Its `ep` is 1 where `pp` and `tp` are not those
            of the mesh: the ranks of `ep` would not be in the order of their numbers, which process groups are in.

    Raises:
        LayoutError: it is not.
    """
    sizes, own = layout.sizes(), mesh.layout.sizes()
    alike = layout.size("dp") == mesh.layout.size("dp") and sizes["cp"] == own["cp"]
    in_order = layout.ep == 1 or (sizes["pp"], sizes["tp"]) == (own["pp"], own["tp"])
    if not alike or not in_order:
        raise LayoutError("layout.device_mesh", f"{layout}: has other data ranks, cp or ep than fit beside {mesh.layout}")
    by_data = mesh.root.mesh.permute(1, 2, 3, 0, 4)  # [dp_replicate, dp_shard, cp, pp, tp]
    shape = [sizes[axis] for axis in ("dp_replicate", "dp_shard", "cp", "pp", "tp")]
    ordered = by_data.reshape(shape).permute(3, 0, 1, 2, 4).flatten()
    ranks = ordered.reshape([sizes[axis] for axis in AXES])  # anew: torch 2.11 reads strides, also those of axes of one rank
    with _torch_compat.shared_groups():
        root = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=AXES)
        experts = None
        if layout.ep > 1:
            expert_ranks = ranks.reshape(tuple(layout.expert_sizes().values()))
            experts = DeviceMesh(mesh.device_type, expert_ranks, mesh_dim_names=EXPERT_AXES)
        return _complete(layout, root, experts)
