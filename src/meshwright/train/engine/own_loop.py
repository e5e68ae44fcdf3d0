"""The engine for a loop of one's own: the steps of `train`, on every axis, without its data, files and metrics."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshwright.checkpoint.directory import damage
from meshwright.checkpoint.manager import save_checkpoint
from meshwright.checkpoint.state import model_tensors
from meshwright.device import release_memory
from meshwright.errors import CheckpointError, ConfigError, MeshwrightError, Refusal, described
from meshwright.layout import Layout
from meshwright.terminal import console
from meshwright.train.engine.loop_audit import tell_loop
from meshwright.train.engine.loop_batches import OwnData
from meshwright.train.engine.loop_group import Membership
from meshwright.train.engine.loop_setup import describe_loop, fill_from
from meshwright.train.engine.loop_steps import LoopSteps, Loss
from meshwright.train.engine.weights import Adapters, weights_of
from meshwright.train.parts import PARTS, runner_of_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Engine"]


class Engine(LoopSteps):
    """Runs the optimizer steps of a loop of one's own. All ranks make it, and call every method, in the same order.

    It starts the process group from the environment of torchrun or Slurm, if there is none. Several engines may live in a
    process, such as a policy and its reference, each on its own layout of the same ranks: they share the group.

    A batch holds whole sequences on the host, those of this data rank (:attr:`data_rank`), the same on all ranks that share
    them: ``input_ids`` [B, S], and see :func:`~meshwright.train.engine.loop_batches.completed`. Each rank computes its part.

    Args:
        model: a causal language model of transformers, or a plain module like one (docs/own-loop.md): with values, the same on
            all ranks, of which each keeps its slices; or on the meta device, to begin at random; or a directory or hub name, of
            which each rank reads its slices.
        layout: sizes of axes, as ``dp_shard=2,tp=2``; what is left out is 1, but ``dp_shard`` takes what is left of the ranks.
        optimizer: the section ``optimizer`` of a configuration, as ``{"kind": "adamw", "lr": 1e-4}``.
        schedule: the section ``schedule``; it needs ``steps``. ``None``: the rate is constant, or given to each step.
        steps: number of optimizer steps in all.
        objective: what the model is trained to do where a step has no loss of its own; an objective, a class, or a function
            ``f(log_probs, batch)`` or ``f(logits, labels)``. ``None``: predict the next token.
        microbatches: largest number of batches of a step on each data rank.
        microbatch_size: sequences in a batch, of which a plan counts activations; smaller ones run too, and larger
            ones unless stages were made for ``sequence_length``.
        sequence_length: tokens of a sequence, for the plan; with `pp` all are padded to it. ``None``: there the first step
            decides.
        packing: ``pack``: rows may hold several documents.
        tensors: further tensors of batches that have a value for each document, as ``{"score": {"per": "document"}}``: given as
            [B, S, ...], at each token the value of its document; a loss gets [B, D, ...].
        clip_norm: largest norm of the gradient; ``None``: no clipping.
        adapter: the section ``adapter``; ``None``: train the model.
        parallel: the section ``parallel``.
        moe: the section ``moe``.
        imports: modules to import first, which register a model or a strategy.
        seed: of weights that begin at random, of dropout, of the order of :meth:`share`.
        device: ``auto``, ``accelerator``, ``cpu``, or torch's name of a kind.
        timeout_minutes: how long a collective waits for other ranks, if this engine starts the process group.

    Attributes:
        plan: what every rank holds and sends.
        data_rank: which part of the data this rank reads.
        data_ranks: number of parts.

    Raises:
        MeshwrightError: all that `plan` would refuse; arguments are named by their keys in a configuration.
    """

    def __init__(
        self,
        model: "PreTrainedModel | str | Path",
        layout: "str | Mapping[str, int | None] | Layout" = "",
        *,
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        steps: int | None = None,
        objective: Loss | None = None,
        microbatches: int = 1,
        microbatch_size: int = 1,
        sequence_length: int | None = None,
        packing: str = "pad",
        tensors: Mapping[str, Any] | None = None,
        clip_norm: float | None = 1.0,
        adapter: Mapping[str, Any] | None = None,
        parallel: Mapping[str, Any] | None = None,
        moe: Mapping[str, Any] | None = None,
        imports: Sequence[str] = (),
        seed: int = 0,
        device: str = "auto",
        timeout_minutes: float = 10.0,
    ) -> None:
        from meshwright.distributed.process_group import adopt_slurm
        from meshwright.train.start.processes import adapted, device_kind

        if schedule is not None and steps is None:
            raise ConfigError("engine.steps", "Engine: a schedule needs the number of steps in all; give steps=")
        adopt_slurm()
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
        loop = describe_loop(
            model,
            layout,
            microbatches=microbatches,
            microbatch_size=microbatch_size,
            sequence_length=sequence_length,
            objective=objective,
            training={"steps": steps or 2**40, "clip_norm": clip_norm, "seed": seed},
            sections={
                "optimizer": optimizer,
                "schedule": schedule or {"kind": "constant"},
                "adapter": adapter,
                "parallel": parallel,
                "moe": moe,
                "imports": list(imports),
                "data": {"packing": packing, "tensors": dict(tensors or {})},
                "launch": {"device": device, "timeout_minutes": timeout_minutes},
            },
        )
        tell_loop(loop)
        kind = device_kind(loop.config, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), launched="RANK" in os.environ)
        config, lines = adapted(loop.config, kind)
        for line in lines if os.environ.get("RANK", "0") == "0" else ():
            console().print(line, highlight=False, markup=False)
        loop = replace(loop, config=config).resolved(ranks)
        setup = loop.setup(ranks)
        parts = replace(PARTS, runner=partial(runner_of_plan, prepares=loop.fixed))
        given = loop.model
        if given is not None and not any(parameter.is_meta for parameter in given.parameters()):
            parts = replace(parts, fill=fill_from(given))
        self._membership = Membership(kind, timedelta(minutes=timeout_minutes))
        try:
            super().__init__(setup, self._membership.device, parts, microbatches=microbatches, steps=steps, fixed=loop.fixed)
        except BaseException:
            self._membership.end(failed=True)
            raise

    def close(self) -> None:
        """End the process group, if an engine started it and no other engine uses it any more."""
        self._membership.end()

    def _repr_html_(self) -> str:
        from meshwright.plan.show.explain import explain
        from meshwright.terminal import html

        return html(explain(self.plan))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:  # else peers may wait in a collective, which ending the group would wait for
            self.close()

    # -- data, weights, files ------------------------------------------------------------------------------------------------

    def share(self, dataset: Sequence[Any], *, epochs: float = 1.0, shuffle: bool = True) -> OwnData:
        """Return the microbatches of this data rank from a data set, for :meth:`step`; it begins after the steps that are done.

        With ``packing="pack"``, rows are packed into sequences of ``sequence_length`` tokens; otherwise each is padded to it.
        All ranks have as many microbatches.

        Args:
            dataset: rows of token ids, the same on all ranks; or mappings with ``input_ids`` and maybe ``loss_mask``.
            epochs: how often it is read.
            shuffle: whether rows are read in another order in each epoch.
        """
        training, data = self.config.training, self.config.data
        if not self._fixed:
            raise ConfigError(
                "engine.data", "Engine.share: how long sequences are is not known; make the engine with sequence_length="
            )
        options = {
            "sequence_length": data.sequence_length,
            "global_batch_size": training.global_batch_size,
            "microbatch_size": training.microbatch_size,
            "data_rank": self.data_rank,
            "data_ranks": self.data_ranks,
            "seed": training.seed,
            "packing": data.packing,
            "shuffle": shuffle,
        }
        return OwnData(dataset, options, epochs, lambda: self.steps_done)

    def shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name in the model and value of each parameter that this rank holds: DTensors where it is sharded.

        Nothing is sent.
        """
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def weights(self, *, adapters: Adapters = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole value of each weight, layer by layer; the same on all ranks. Names are those of its files.

        Args:
            adapters: ``merged``: added to the weights; ``apart``: the adapters alone, as in files of peft.
        """
        return weights_of(self.model, self.described, self.plan, self.mesh, adapters)

    def save(self, path: str | Path, state: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint of model, optimizer and random numbers. It appears when it is complete.

        Args:
            path: its directory; an earlier checkpoint there is replaced.
            state: further plain values, which :meth:`load` returns.

        Raises:
            CheckpointError: on all ranks, if it could not be written.
        """
        facts = {**self.facts_to_save(), "source": self._source(), "state": dict(state or {})}
        save_checkpoint(Path(path), self.steps_done, self.tensors_to_save(), facts)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint of this engine or of a run, written on any layout; go on after its step; return its ``state``.

        Raises:
            CheckpointError: it is damaged, or of another model or optimizer; then nothing was changed.
        """
        checkpoint = Path(path)
        if damages := damage(checkpoint, dist.group.WORLD):
            raise CheckpointError([Refusal("checkpoint.damaged", f"{checkpoint}: is damaged: {line}") for line in damages])
        return dict(self.read(checkpoint).get("state", {}))

    def export(self, directory: str | Path, *, adapter: bool = False, overwrite: bool = False) -> None:
        """Write the model as a directory of transformers, adapters merged; or the adapter alone, as one of peft.

        It is written by rank 0 from a checkpoint of the model, which lies beside it meanwhile.

        Args:
            directory: where; see :func:`~meshwright.checkpoint.export.export_checkpoint`.
            adapter: write the adapter alone.
            overwrite: replace an earlier export.

        Raises:
            CheckpointError: on all ranks, if it could not be written.
        """
        from transformers import PreTrainedModel

        from meshwright.checkpoint.export import export_checkpoint

        if not isinstance(self.described, PreTrainedModel):
            said = f"{type(self.described).__name__} is no model of transformers, so no directory of transformers can hold it"
            raise ConfigError("engine.model", f"Engine.export: {said}; save() writes a checkpoint, weights() gives its weights")
        target = Path(directory)
        temporary = target.resolve().with_name(f".{target.name}.checkpoint")
        tensors = model_tensors(self.model, trained=self.config.saves_trained_only)
        save_checkpoint(temporary, self.steps_done, tensors, {**self.facts_to_save(), "source": self._source()})
        failure: list[Any] = [None]
        if self.rank == 0:
            try:
                export_checkpoint(temporary, target, adapter=adapter, overwrite=overwrite)
            except MeshwrightError as error:
                failure = [error.problems]
            except Exception as error:  # the others wait for how it ended
                failure = [[Refusal("checkpoint.unwritten", f"{directory}: cannot be written: {described(error)}")]]
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        dist.broadcast_object_list(failure, src=0)
        if failure[0]:
            raise CheckpointError(failure[0])

    def _source(self) -> dict[str, Any]:
        """Return facts of the files that the model began with, which an export restores."""
        from meshwright.models.weights.build import weight_files
        from meshwright.models.weights.source import facts, fingerprint

        if self.config.model.path is None or self.rank != 0:
            return {}
        files = weight_files(self.config.model)
        return facts(files) | ({} if self.config.adapter is None else {"base": fingerprint(files)})

    def offload(self) -> None:
        """Move model, gradients and optimizer state to the host, so that another program can use the device.

        Until :meth:`onload`, the engine runs no steps.
        """
        if self.plan.options.cpu_offload or self.lent is not None:
            return
        self.lent = []
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device == self.device:  # counters of steps may be on the host
                    state[name] = value.to("cpu")
                    self.lent.append((state, name))
        self.model.to("cpu")
        release_memory(self.device)

    def onload(self) -> None:
        """Move them back to the device."""
        if self.lent is None:
            return
        self.model.to(self.device)
        for state, name in self.lent:
            state[name] = state[name].to(self.device)
        self.lent = None
