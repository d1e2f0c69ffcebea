"""Manifests as YAML."""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.errors import UsageError, to_install
from rallypoint.launch.kubernetes.objects import Part, plain


def yaml_of(manifests: Iterable[Part]) -> str:
    """Return the manifests as one YAML text. UsageError if PyYAML is not installed."""
    try:
        import yaml
    except ImportError:
        raise UsageError(f"manifests need PyYAML: {to_install('k8s')}") from None

    class _Dumper(yaml.SafeDumper):
        """Writes texts of several lines as they stand, and no references to what stood before."""

        def ignore_aliases(self, data: object) -> bool:
            """There are no references."""
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    _Dumper.add_representer(str, text)
    data = [plain(manifest) for manifest in manifests]
    return str(yaml.dump_all(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))
