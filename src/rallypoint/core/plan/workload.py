"""What is trained, as the cost model sees it: layers with their words and seconds, and how they are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rallypoint.core.layout import SHARD_BYTES, WORD_BYTES

# Bytes that a word takes, by the codec's name; blocks of 256 and of 64 words have a scale in fp32
SENT_BYTES: Mapping[str, float] = {"raw": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 64}


class Layer(msgspec.Struct, frozen=True):
    """A part of the model that runs at once: its parameters (fp32 words), seconds of its forward and its backward pass.

    Its forward pass needs all of its parameters; its gradients exist when its backward pass ends. Seconds are those of
    one replica.
    """

    words: int
    forward: float = 0.0
    backward: float = 0.0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's step, and how its contributions are sent.

    Attributes:
        layers: in the order of the forward pass.
        shard_bytes: the size of a shard.
        up, down: bytes that a word takes in a contribution, and in a version; 4 is raw fp32.
        clip: no version exists before the norm of the whole gradient is known (`clip=`, `nonfinite="skip"`).
        steps: steps of a round. With more than one (local steps) what is pushed exists when the round has ended, and
            the next round begins with all of its version.
        early: a step's forward pass begins before all of its version is here.
    """

    layers: tuple[Layer, ...]
    shard_bytes: int = SHARD_BYTES
    up: float = float(WORD_BYTES)
    down: float = float(WORD_BYTES)
    clip: bool = False
    steps: int = 1
    early: bool = True

    @property
    def words(self) -> int:
        return sum(layer.words for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """K: the gradient in fp32."""
        return WORD_BYTES * self.words

    @property
    def forward(self) -> float:
        """Seconds of a forward pass."""
        return sum(layer.forward for layer in self.layers)

    @property
    def backward(self) -> float:
        """Seconds of a backward pass."""
        return sum(layer.backward for layer in self.layers)

    @property
    def compute(self) -> float:
        """Seconds that a replica computes in a step."""
        return self.forward + self.backward


def layers_of(sizes: Sequence[int], seconds: float) -> tuple[Layer, ...]:
    """Layers of these sizes (words) that compute for `seconds` together, a third of it forward.

    The seconds are shared out by size, as multiplications are in most layers.
    """
    each = seconds / (sum(sizes) or 1.0) / 3  # of a word, forward
    return tuple(Layer(size, each * size, 2 * each * size) for size in sizes)


_DEPTH_BASE, _DEPTH_AT = 12, 125e6  # GPT-2 small has 12 blocks, 32 at 7e9: the depth grows as the size to the 1/4


def transformer(words: float, seconds: float) -> tuple[Layer, ...]:
    """A transformer of so many parameters, as far as a planner needs one: equal blocks, attention and MLP 1 : 2.

    It has as many blocks as models of this size have (12 for 125 M, 32 to 33 for 7e9). Embeddings are counted with the
    blocks: in large models they are a few percent.
    """
    depth = max(1, round(_DEPTH_BASE * (words / _DEPTH_AT) ** 0.25))
    sizes = [size for _ in range(depth) for size in (int(words / depth / 3), int(2 * words / depth / 3))]
    return layers_of(sizes, seconds)
