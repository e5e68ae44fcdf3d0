"""Reads and writes one checkpoint directory with DCP (torch.distributed.checkpoint).

DCP pickles its table of contents. Here the table is read by an unpickler that knows only the classes of such a table, so a
checkpoint from elsewhere cannot run code. Tensors are read with ``weights_only``. DCP would unpickle everything else, so
nothing else is read.
"""

import io
import pickle
import warnings
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.checkpoint import checksums
from meshwright.checkpoint.staging import HostCopies
from meshwright.distributed import _torch_compat
from meshwright.distributed.slices import slice_like, whole_tensor
from meshwright.errors import CheckpointError, described

__all__ = ["contents", "read", "reason", "write", "write_in_background"]

_METADATA = "torch.distributed.checkpoint.metadata"
_TABLE_CLASSES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of a table of contents, or a dtype or layout of torch, by its exact name; refuse everything else."""
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle a member of an enum by its name
            return _member
        if module == "pathlib._local":  # Python 3.13 names the module of paths that no other one has
            module = "pathlib"
        values = (torch.dtype, torch.layout, torch.memory_format)
        if (module, name) in _TABLE_CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), values)):
            return super().find_class(module, name)
        raise CheckpointError(
            "checkpoint.pickle", f"the checkpoint's table of contents refers to {module}.{name}, so it is not read"
        )


def _member(kind: Any, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise CheckpointError(
            "checkpoint.pickle", f"the checkpoint's table of contents refers to {name} of {kind}, so it is not read"
        )
    return kind[name]


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        metadata = _TableUnpickler(io.BytesIO(path.read_bytes())).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def contents(directory: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name to (global shape, dtype) of every tensor in a checkpoint.

    Raises:
        CheckpointError: there is no readable table of contents.
    """
    try:
        metadata = _Reader(directory).read_metadata()
    except CheckpointError as error:
        raise CheckpointError("checkpoint.unreadable", f"{directory}: {error}") from error
    except Exception as error:  # damaged pickles raise errors of all kinds
        raise CheckpointError(
            "checkpoint.unreadable", f"{directory}: its table of contents cannot be read: {described(error)}"
        ) from error
    return {
        name: (tuple(item.size), str(item.properties.dtype).removeprefix("torch."))
        for name, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }


def write(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors. This is collective over all ranks.

    Raises:
        CheckpointError: on all ranks, if one could not write.
    """
    try:
        dcp.save(_plain(tensors), storage_writer=_Writer(directory), no_dist=not dist.is_initialized())
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        raise CheckpointError("checkpoint.unwritten", f"{directory}: not written: {reason(error)}") from error


def write_in_background(
    directory: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None, copies: HostCopies
) -> Any:
    """Copy tensors and write the copies in a thread; return a future. This is collective over ``group`` (gloo)."""
    return dcp.async_save(
        _plain(tensors),
        storage_writer=_Writer(directory),
        process_group=group,
        no_dist=not dist.is_initialized(),
        async_stager=copies,
    )


def read(directory: Path, tensors: dict[str, torch.Tensor], *, alone: bool = False) -> None:
    """Read into tensors, in place. Every rank reads the part that it holds. This is collective over all ranks.

    Args:
        directory: the checkpoint.
        tensors: name to tensor.
        alone: whether this rank alone reads, into whole tensors.

    Raises:
        CheckpointError: files are missing or damaged, or do not hold these tensors.
    """
    stored = contents(directory)
    if missing := [name for name in tensors if name not in stored]:
        shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
        raise CheckpointError("checkpoint.unreadable", f"{directory}: holds no tensor {shown}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended here
            plain = _plain(tensors)
            dcp.load(plain, storage_reader=_Reader(directory), no_dist=alone or not dist.is_initialized())
            for name, tensor in tensors.items():
                held_as = plain[name]
                if held_as is not tensor and isinstance(tensor, DTensor) and isinstance(held_as, DTensor):
                    tensor.to_local().copy_(slice_like(tensor, whole_tensor(held_as)))
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        raise CheckpointError("checkpoint.unreadable", f"{directory}: cannot be read: {reason(error)}") from error


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors that DCP can describe. A packed matrix under tensor parallel is redistributed, others are unchanged."""
    plain = dict(tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and (placements := _torch_compat.plain_placements(tensor)) is not None:
            mesh = tensor.device_mesh
            with torch.no_grad():
                plain[name] = distribute_tensor(whole_tensor(tensor), mesh, placements, src_data_rank=None)
                _torch_compat.own_memory(plain[name])  # else it would keep the whole tensor's memory until it is written
    return plain


class _Written(list[Any]):
    """What DCP knows of the tensors that a rank wrote, with the checksums of its files. Both are sent to rank 0 together."""

    def __init__(self, results: Iterable[Any] = (), sums: Mapping[str, str] | None = None) -> None:
        super().__init__(results)
        self.sums = dict(sums or {})


class _Writer(dcp.FileSystemWriter):
    """Writes the files of a checkpoint, and their checksums."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, thread_count=1, sync_files=True)
        self.fs: checksums.SummingFiles = checksums.SummingFiles()

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Write the files of this rank. With one thread, they are complete when this returns."""
        return super().write_data(*args, **kwargs).then(lambda done: _Written(done.value(), self.fs.sums))

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Complete the checkpoint on rank 0, with the results of all ranks."""
        super().finish(metadata, results)
        sums = {name: digest for written in results for name, digest in written.sums.items()}
        sums[".metadata"] = self.fs.sums[".metadata.tmp"]
        checksums.append(Path(self.path), sums)


def reason(error: BaseException) -> str:
    """Return the first cause in DCP's report of all ranks, without its traceback."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {described(cause)}"
    return described(error)
