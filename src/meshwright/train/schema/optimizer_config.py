"""The sections of the configuration that say how a step changes parameters: ``optimizer`` and ``schedule``."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from meshwright.train.schema.optimizer_kinds import ADAMW, KEYS, MUON, Kind, options_of
from meshwright.train.schema.parallel_config import Section
from meshwright.user_code import PartConfig, part_text

__all__ = ["OptimizerConfig", "OptimizerGroup", "ScheduleConfig", "Updater"]

_Decay = Annotated[float, Field(ge=0, lt=1)]


class _Replaceable(Section):
    """A section that a part of the user may stand in for: ``kind`` is ours, ``use`` theirs."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    use: str | None = Field(default=None, min_length=1, description="One of your own, as `module:Name`, in place of kind.")
    arguments: dict[str, Any] = Field(default={}, alias="with", description="Its arguments, with use.")

    @property
    def part(self) -> PartConfig | None:
        """The part of the user; ``None``: there is none."""
        return None if self.use is None else PartConfig.model_validate({"use": self.use, "with": self.arguments})

    def beside_use(self, *keys: str) -> None:
        """Refuse keys of ours beside a part.

        Raises:
            ValueError: there are some.
        """
        name = type(self).__name__.removesuffix("Config").lower()
        if self.use is not None and (set_too := [key for key in keys if key in self.model_fields_set and self.changed(key)]):
            raise ValueError(f"{name}.use={self.use}: {', '.join(set_too)} belongs to kind; leave it out, or put it into with")

    def changed(self, key: str) -> bool:
        """Return whether a key has another value than its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)


_CHANGED = "lr, lr_decay, weight_decay, betas, eps, fused, kind, use and with"
_OF_SOME = ("betas", "eps", "fused")
"""Keys that only some kinds take."""


class OptimizerGroup(Section):
    """Another rate, decay or setting for some parameters, or another optimizer."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    match: str = Field(min_length=1, description="Pattern of names of parameters, or of modules that hold them.")
    lr: float | str = "1x"
    lr_decay: float | None = Field(default=None, gt=0, le=1)
    weight_decay: float | None = Field(default=None, ge=0)
    betas: tuple[_Decay, _Decay] | None = None
    eps: float | None = Field(default=None, gt=0)
    fused: bool | None = None
    kind: Kind | None = None
    use: str | None = Field(default=None, min_length=1)
    arguments: dict[str, Any] = Field(default={}, alias="with")

    @model_validator(mode="before")
    @classmethod
    def _of_the_whole(cls, given: Any) -> Any:
        found = [key for key in ("decay", "no_decay") if isinstance(given, dict) and key in given]
        if found:
            raise ValueError(
                f"optimizer.groups: {given.get('match')!r} has {found[0]}; it lists patterns of the whole model: set "
                f"optimizer.{found[0]}, or weight_decay here, the decay of what is decayed in this group (0: of nothing)"
            )
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model_fields_set <= {"match"}:
            raise ValueError(f"optimizer.groups: {self.match!r} changes nothing; legal are {_CHANGED}")
        if self.kind is not None and self.use is not None:
            raise ValueError(f"optimizer.groups: {self.match!r} has kind and use; kind is ours, use is yours")
        try:
            rate = self.share(1.0)
        except ValueError:
            rate = 0.0
        if not 0 < rate < math.inf or (isinstance(self.lr, str) and not self.lr.endswith("x")):
            legal = "legal are a rate above 0, and a share of optimizer.lr, as 0.1x"
            raise ValueError(f"optimizer.groups: {self.match!r} has lr={self.lr!r}; {legal}")
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the later keys that are not set, so that groups of earlier checkpoints are equal to the same ones now."""
        return {
            key: own
            for key, own in write(self).items()
            if key in ("match", "lr", "lr_decay", "weight_decay") or own not in (None, {})
        }

    def share(self, rate: float) -> float:
        """Return its learning rate as a share of another one."""
        return float(self.lr.removesuffix("x")) if isinstance(self.lr, str) else self.lr / rate


@dataclass(frozen=True)
class Updater:
    """An optimizer of a configuration: ours or one of the user, with its options.

    Attributes:
        name: in the rows of the plan.
        kind: one of ours; empty: it is the user's.
        part: that of the user; ``None``: it is ours.
        options: of ours; ``None``: it is the user's.
    """

    name: str
    kind: str
    part: PartConfig | None
    options: Section | None


class OptimizerConfig(_Replaceable):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), another optimizer of docs/optimizers.md, or one of your own."""

    kind: Kind = Field(default=ADAMW, description="The optimizer. `with` has the options of each: docs/optimizers.md.")
    arguments: dict[str, Any] = Field(default={}, alias="with", description="Options of kind, or arguments of use.")
    lr: float = Field(default=3e-4, gt=0, description="Peak learning rate.")
    betas: tuple[_Decay, _Decay] = Field(default=(0.9, 0.95), description="Of AdamW: decay of the two moments.")
    eps: float = Field(default=1e-8, gt=0, description="Of AdamW: added to the denominator.")
    weight_decay: float = Field(
        default=0.1, ge=0, description="Decoupled weight decay of matrices; vectors (norms, biases, also those of experts, "
        "which lie behind each other in one tensor) are never decayed. `meshwright plan` says it of each parameter."
    )  # fmt: skip
    decay: list[str] = Field(default=[], description="Patterns of the names of vectors and norms that are decayed too.")
    no_decay: list[str] = Field(default=[], description="Patterns of the names of matrices that are not decayed either.")
    groups: list[OptimizerGroup] = Field(
        default=[],
        description="Other rates and decays, as in [{match: '**.embed_tokens', lr: 0.1x, weight_decay: 0}]. match: a pattern "
        "of names of parameters, or of modules that hold them; the first that matches counts. lr: a rate, or a share of "
        "optimizer.lr, as 0.1x. lr_decay: a factor for each layer from the last one down; what is before the first layer is "
        "one below. weight_decay: of what is decayed. betas, eps, fused: as those of optimizer. kind or use, and with: another "
        "optimizer for the group.",
    )
    fused: bool | None = Field(default=None, description="One kernel for the whole update. null: wherever torch can.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.beside_use("kind")
        kinds = {one.kind for one in self.updaters.values()}
        for key in _OF_SOME:
            if self.changed(key) and not any(key in KEYS.get(kind, ()) for kind in kinds):
                chosen = f"kind={self.kind}" if self.use is None else f"use={self.use}"
                said = f"optimizer.{chosen}: {key} belongs to {_having(key)}; leave it out, or see what `with` takes"
                raise ValueError(said)
        for group in self.groups:
            other = self.updater_of(group)
            found = [key for key in _OF_SOME if getattr(group, key) is not None and key not in KEYS.get(other.kind, ())]
            if found:
                said = f"has {', '.join(found)}, which belongs to {_having(found[0])}, and {other.name}; see `with`"
                raise ValueError(f"optimizer.groups: {group.match!r} {said}")
        return self

    @property
    def _whole(self) -> Updater:
        return _updater("optimizer", self.kind, self.use, self.arguments)

    def updater_of(self, group: OptimizerGroup) -> Updater:
        """Return the optimizer of a group. Its ``with`` changes arguments of that of the run where it names no other."""
        where = f"optimizer.groups: {group.match!r}"
        if group.kind is not None or group.use is not None:
            return _updater(where, group.kind or "", group.use, group.arguments)
        return _updater(where, self.kind, self.use, {**self.arguments, **group.arguments})

    def others(self, group: OptimizerGroup) -> tuple[tuple[str, Any], ...]:
        """Return what a group changes besides rate and decay, as pairs, in the words of a row of the plan."""
        found = {key: getattr(group, key) for key in _OF_SOME}
        if group.kind is not None or group.use is not None or group.arguments:
            found["rule"] = self.updater_of(group).name
        return tuple((key, own) for key, own in found.items() if own is not None)

    @property
    def updaters(self) -> dict[str, Updater]:
        """The optimizers by their names; that of the parameters in no group is the first. Beside Muon there is AdamW."""
        beside = [_updater("optimizer", ADAMW, None, {})] if self.kind == MUON and self.use is None else []
        return {one.name: one for one in (self._whole, *beside, *map(self.updater_of, self.groups))}

    @property
    def kinds(self) -> set[str]:
        """The kinds of the optimizers; empty for one of the user."""
        return {one.kind for one in self.updaters.values()}

    @property
    def is_adamw(self) -> bool:
        """Whether it is AdamW for all parameters."""
        return self.kinds == {ADAMW}

    @property
    def is_ours(self) -> bool:
        """Whether none is the user's."""
        return all(one.part is None for one in self.updaters.values())

    @property
    def as_adamw(self) -> Self:
        """The same settings for AdamW, which stands in for other optimizers where these cannot run or be compared."""
        if self.is_adamw:
            return self
        nothing: dict[str, Any] = {"use": None, "arguments": {}}
        groups = [one.model_copy(update={**nothing, "kind": None}) for one in self.groups]
        return self.model_copy(update={**nothing, "kind": ADAMW, "groups": groups})


def _updater(where: str, kind: str, use: str | None, arguments: dict[str, Any]) -> Updater:
    named = PartConfig.model_validate({"use": use or kind, "with": arguments})
    if use is not None:
        return Updater(part_text(named), "", named, None)
    return Updater(part_text(named), kind, None, options_of(where, kind, arguments))


def _having(key: str) -> str:
    return f"kind={next(kind for kind, keys in KEYS.items() if key in keys)}"


class ScheduleConfig(_Replaceable):
    """Learning rate over the steps: linear warmup to the peak, then a decay; or a function of your own."""

    kind: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt", "polynomial"] = Field(
        default="cosine",
        description="Shape of the decay. wsd: warmup, stable, and a linear decay at the end (MiniCPM, arXiv 2404.06395, "
        "section 4). inverse_sqrt: the root of warmup_steps / step (arXiv 1706.03762, section 5.3).",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warmup.")
    final_ratio: float = Field(default=0.1, ge=0, le=1, description="Final, or least, learning rate as a share of the peak.")
    decay_steps: int | None = Field(default=None, ge=1, description="Of wsd: steps of the decay; null: a tenth of all.")
    power: float = Field(default=1.0, gt=0, description="Of polynomial: the power of the share of steps that is left.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.use is None and self.arguments:
            raise ValueError("schedule.with: are the arguments of schedule.use, which is null; leave them out")
        self.beside_use("kind", "warmup_steps", "final_ratio", "decay_steps", "power")
        for key, kind in (("decay_steps", "wsd"), ("power", "polynomial")):
            if self.kind != kind and self.changed(key):
                raise ValueError(f"schedule.{key}={getattr(self, key)}: is a key of kind={kind}; leave it out")
        return self
