"""The log-probabilities of a reference that are computed once, before the first step, and kept beside the tokens.

The reference is the model as the run begins: with the values of its files, or those that its seed gives, and with the adapter
that it begins with. They are the same on every layout, so a run that resumes reads them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.manager import COSMETIC
from meshwright.data.index import INDEX
from meshwright.data.scores import Scores
from meshwright.errors import CheckpointError, ConfigError, DataError, Problems, Refusal, number_of
from meshwright.models.objective import PRECOMPUTED
from meshwright.objectives.trying.invented import REFERENCE
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import RunSetup, plain_config

if TYPE_CHECKING:
    from meshwright.data.store import TokenStore

__all__ = ["BYTES", "PREFIX", "REFERENCE_FACTS", "ReferenceValues", "check_reference", "model_facts", "reference_values"]

PREFIX = REFERENCE.removesuffix("log_probs")
"""Of the column, among those that the pass over the tokens can write."""

REFERENCE_FACTS = "reference"
"""Key of a checkpoint with what the reference is."""

BYTES = 4
"""Of the value of a token."""

_DECIDE = {
    "weights": "the weights of the model (model.path, or training.seed of a new one)",
    "adapter": "the adapter that it begins with (adapter.path)",
    "base": "adapter.base",
}
"""What makes a reference another one for a run that resumes. Config and dtype are compared, or told, by themselves."""


@dataclass(frozen=True)
class ReferenceValues:
    """Where the values of a run are, or will be.

    Attributes:
        directory: their directory, whose name has a digest of what the reference is.
        model: what the reference is, as plain values.
        there: whether they are complete.
    """

    directory: Path
    model: dict[str, Any]
    there: bool

    def describe(self, store: "TokenStore") -> str:
        """Return a line for people."""
        tokens = number_of(store.index.tokens, "token")
        if self.there:
            return f"reference: log-probabilities of {tokens} are read from {self.directory}"
        return f"reference: log-probabilities of {tokens} are computed before the first step, for {self.directory}"

    def check(self, store: "TokenStore", *, fast: bool = False) -> list[str]:
        """Return a line for each file that is damaged. Then the values have to be computed again."""
        if not self.there:
            return []
        try:
            return Scores.open(self.directory, store).damage(fast=fast)
        except DataError as error:
            return [str(line) for line in error.problems]


def reference_values(setup: RunSetup, store: "TokenStore") -> ReferenceValues | None:
    """Return where the values of a run are; ``None``: its objective needs none. Ends of the files of its weights are read.

    Raises:
        ConfigError: a token would have another context in the run than in the pass over the tokens.
        ModelError: the weights of the reference are not there.
    """
    if setup.objective.reference != PRECOMPUTED:
        return None
    if setup.config.data.packing == "pack" and store.index.long_documents == "split":
        raise ConfigError(
            "objective.reference",
            "data.packing=pack: texts are cut at other places in each epoch, and what a reference says of a token depends on "
            "those before it; with a reference that is computed once, legal are data.packing=pad, and data.long_documents="
            "truncate, drop or error",
        )
    model = model_facts(setup)
    digest = hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()
    directory = store.directory.with_name(f"{store.directory.name}-reference-{digest[:16]}")
    return ReferenceValues(directory, model, (directory / INDEX).is_file())


def model_facts(setup: RunSetup) -> dict[str, Any]:
    """Return what the model of a run is as it begins: what decides what it says of tokens, and no layout."""
    from meshwright.models.weights.build import weight_files
    from meshwright.models.weights.source import PLACES, fingerprint

    config, adapter = setup.config, setup.config.adapter
    path = None if adapter is None else adapter.path
    files = [] if path is None else sorted(Path(path).expanduser().glob("*.safetensors"))
    own = fingerprint(weight_files(config.model), within=PLACES) if config.model.path else f"seed {config.training.seed}"
    return {
        "weights": own,
        "adapter": None if path is None else fingerprint(files, within=PLACES),
        "base": None if adapter is None else adapter.base,
        "config": _digest(_plain(plain_config(setup.model))),
        "dtype": _dtype(config),
    }


def _dtype(config: RunConfig) -> str:
    return config.parallel.param_dtype or config.model.dtype


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) if isinstance(value, dict) else value for key, value in config.items() if key not in COSMETIC}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def check_reference(before: Mapping[str, Any] | None, now: ReferenceValues | None) -> None:
    """Refuse to go on with another reference than that of a checkpoint.

    Args:
        before: what the reference of the checkpoint was; ``None``: it had none.
        now: that of this run.

    Raises:
        CheckpointError: names what differs.
    """
    if before is None or now is None:
        return
    problems = Problems(
        Refusal(
            "checkpoint.reference",
            f"{words}: other than when the run began, and the checkpoint was trained against what the model said then; go back "
            "to it, or choose another output",
        )
        for name, words in _DECIDE.items()
        if before.get(name) != now.model[name]
    )
    if problems:
        raise CheckpointError(problems)
