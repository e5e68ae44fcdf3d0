"""Reads and writes YAML as people write it in configurations."""

import re
from typing import Any

import yaml

__all__ = ["Dumper", "Loader"]


class Loader(yaml.SafeLoader):
    """Reads YAML 1.1 as PyYAML does, with two differences.

    1e-5 is a number, because `model.config` has no schema that would convert it. A key that occurs twice is an error.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that occurs twice, because PyYAML would silently drop the first."""
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Writes YAML, with quotes around strings that :class:`Loader` would read as numbers."""


for _side in (Loader, Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
