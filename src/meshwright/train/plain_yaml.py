"""YAML as people write it in configurations."""

import re
from typing import Any

import yaml

__all__ = ["Dumper", "Loader"]


class Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but 1e-5 is a number (in `model.config` no schema is there to convert it), and a key that
    stands twice is an error.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that stands twice: PyYAML would drop the first without a word."""
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes the strings that :class:`Loader` would take for numbers."""


for _side in (Loader, Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
