"""Names and quantities that Kubernetes takes: they stand in a manifest as they are written, so others are refused."""

from __future__ import annotations

import re

from rallypoint.errors import UsageError

LONGEST_NAME = 63  # of whatever becomes part of a DNS name
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_SUBDOMAIN = 253
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_KEY = re.compile(rf"({_SUBDOMAIN.pattern}/)?{_LABEL_VALUE.pattern}")
_SNAPSHOT = re.compile(rf"({_LABEL.pattern}|[a-z0-9]+://[!-~]+)/(latest|step-\d{{1,18}}-\d{{1,9}})")
_FILE = re.compile(r"[-._A-Za-z0-9]{1,253}")  # as a key in a ConfigMap
_IMAGE = re.compile(r"[!-~]+")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?")


def check_label(text: str, option: str) -> None:
    """Raise UsageError unless `text` is a DNS label (RFC 1035), as names in Kubernetes must be."""
    if len(text) > LONGEST_NAME or _LABEL.fullmatch(text) is None:
        raise UsageError(
            f"{option} {_shown(text)}: a name has small letters, digits and '-', begins "
            f"with a letter and ends with a letter or a digit, and has at most {LONGEST_NAME} of them"
        )


def check_name(text: str, option: str) -> None:
    """Raise UsageError unless `text` is a DNS subdomain (RFC 1123), as names of Secrets and claims are."""
    if len(text) > _LONGEST_SUBDOMAIN or _SUBDOMAIN.fullmatch(text) is None:
        raise UsageError(
            f"{option} {_shown(text)}: a name has small letters, digits, '-' and '.', begins and ends with a letter or "
            f"a digit, and has at most {_LONGEST_SUBDOMAIN} of them"
        )


def check_quantity(text: str) -> None:
    """Raise UsageError unless `text` is "" or an amount, as Kubernetes writes it: ``500m``, ``2Gi``."""
    if text and _QUANTITY.fullmatch(text) is None:
        raise UsageError(f"'{text}' is no quantity: write 2 or 500m of a processor, 4Gi of memory or storage")


def check_image(image: str) -> None:
    """Raise UsageError unless this is an image's name."""
    if not image:
        raise UsageError("which image? give --image NAME:TAG: it needs rallypoint and your script")
    if _IMAGE.fullmatch(image) is None:
        raise UsageError(f"--image {image!r}: an image's name has no spaces: write NAME:TAG")


def check_snapshot(text: str) -> None:
    """Raise UsageError unless `text` names a snapshot of another job, with its place."""
    if _SNAPSHOT.fullmatch(text) is None:
        raise UsageError(
            f"--resume {text!r}: write JOB/SNAPSHOT, as gpt/step-00000120-10003, or URL/SNAPSHOT of a store elsewhere"
        )


def check_file(name: str) -> None:
    """Raise UsageError unless a script of this name can travel in a ConfigMap."""
    if _FILE.fullmatch(name) is None:
        raise UsageError(f"--send-script: {name!r} cannot be the name of a file in a manifest: letters, digits, -._")


def node_label(text: str) -> tuple[str, str]:
    """Return the key and the value of a label of nodes, ``KEY=VALUE``. Raises UsageError if it is none."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UsageError(f"--spot {text}: write the nodes' label as KEY=VALUE")
    if _LABEL_KEY.fullmatch(key) is None or _LABEL_VALUE.fullmatch(value) is None:
        raise UsageError(f"--spot {text!r} is no label of a node: as cloud.google.com/gke-spot=true")
    return key, value


def _shown(text: str) -> str:
    return text if text.isprintable() else repr(text)
