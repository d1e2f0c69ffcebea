"""The pods of a JobSet as processes of this machine: each at its own address, with folders as volumes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manifests import Manifest, pod_of

from support.programs import Program


@dataclass(frozen=True)
class Pod:
    """A pod that Kubernetes would make of a manifest."""

    name: str
    host: str  # the name under which others find it
    ip: str
    role: str
    manifest: Manifest

    @property
    def container(self) -> Manifest:
        """Its only container."""
        (found,) = self.manifest["spec"]["containers"]
        container: Manifest = found
        return container


def pods_of(name: str, spec: Manifest) -> list[Pod]:
    """The pods of a JobSet, named as its controller and the one of Jobs do it."""
    found: list[Pod] = []
    for job in spec["replicatedJobs"]:
        for index in range(job.get("replicas", 1)):
            for completion in range(job["template"]["spec"]["completions"]):
                own = f"{name}-{job['name']}-{index}-{completion}"
                subdomain = spec.get("network", {}).get("subdomain", name)
                ip = _address(len(found))
                found.append(Pod(f"{own}-x{len(found)}", f"{own}.{subdomain}", ip, job["name"], pod_of(job)))
    return found


def _address(number: int) -> str:
    """A loopback address that no other test uses: each process of the tests has 200 of its own."""
    return f"127.{10 + os.getpid() // 250 % 240}.{os.getpid() % 250 + 1}.{number + 1}"


class Kubelet:
    """Starts pods as processes in `folder`. Environment, ``$(NAME)`` and volumes are as a pod has them.

    secrets: the data of each Secret.
    """

    def __init__(self, folder: Path, pods: list[Pod], secrets: Mapping[str, Mapping[str, str]]) -> None:
        self.folder, self.pods, self._secrets = folder, pods, secrets
        self.running: dict[str, Program] = {}

    def start(self, pod: Pod) -> None:
        """Start the process of a pod's container."""
        mounts = self._mounts(pod)
        env = {name: self._at_home(value, pod, mounts) for name, value in self._env(pod).items()}
        words = [*pod.container["command"], *pod.container.get("args", [])]
        argv = [self._at_home(expanded(word, env), pod, mounts) for word in words]
        assert argv[0] == "rallypoint"
        # The variables of a pod, and of this process only what it takes to run.
        inherited = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
        self.running[pod.name] = Program(
            ["-m", "rallypoint.cli", *argv[1:]], self.folder / f"{pod.name}.log", {**inherited, **env}, self.folder
        )

    def said(self, pod: Pod) -> str:
        """What a pod's process has printed."""
        log = self.folder / f"{pod.name}.log"
        return log.read_text() if log.exists() else ""

    def end(self) -> None:
        """Kill what still runs."""
        for program in self.running.values():
            program.kill()
            program.wait()

    def _env(self, pod: Pod) -> dict[str, str]:
        fields = {"metadata.name": pod.name, "status.podIP": pod.ip}
        env: dict[str, str] = {}
        for item in pod.container["env"]:
            if "value" in item:
                env[item["name"]] = expanded(item["value"], env)
                continue
            env[item["name"]] = fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
        return env

    def _mounts(self, pod: Pod) -> dict[str, Path]:
        """The folder of each path where something is mounted."""
        volumes = {volume["name"]: volume for volume in pod.manifest["spec"].get("volumes", [])}
        mounts: dict[str, Path] = {}
        for mount in pod.container["volumeMounts"]:
            volume = volumes[mount["name"]]
            shared = "persistentVolumeClaim" in volume
            folder = self.folder / "volumes" / (mount["name"] if shared else f"{pod.name}-{mount['name']}")
            folder.mkdir(parents=True, exist_ok=True)
            for item in volume.get("secret", {}).get("items", []):
                file = folder / item["path"]
                file.write_text(self._secrets[volume["secret"]["secretName"]][item["key"]])
                file.chmod(0o600)
            mounts[mount["mountPath"]] = folder
        return mounts

    def _at_home(self, word: str, pod: Pod, mounts: Mapping[str, Path]) -> str:
        """The word with what exists here: folders for mounts, addresses for names, the pod's own for any."""
        for path, folder in mounts.items():
            word = re.sub(rf"(?<![\w/]){re.escape(path)}(?![\w-])", str(folder), word)
        for other in self.pods:
            word = word.replace(other.host, other.ip)
        return word.replace("[::]", pod.ip)


def expanded(word: str, env: Mapping[str, str]) -> str:
    """The word with ``$(NAME)`` as Kubernetes has it: what is unknown stays, and ``$$`` is a dollar."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0]), word)


@contextmanager
def kubelet(folder: Path, pods: list[Pod], secrets: Mapping[str, Mapping[str, str]]) -> Iterator[Kubelet]:
    """In the body, a kubelet; what it has started ends with it."""
    made = Kubelet(folder, pods, secrets)
    try:
        yield made
    finally:
        made.end()


def told(kubelet: Kubelet) -> str:
    """What all pods have printed, for a test that fails."""
    return "\n".join(f"== {shlex.quote(pod.name)}\n{kubelet.said(pod)}" for pod in kubelet.pods)
