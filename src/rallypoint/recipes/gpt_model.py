"""A byte-level GPT: small enough to read in one sitting, real enough to train.

Radford et al. 2019 (GPT-2) with pre-norm blocks, a GELU MLP, learned positions and one matrix for both the input and
the output embedding. Text is bytes, so there is no tokenizer and every folder of text is training data.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rallypoint.errors import ConfigError
from rallypoint.recipes.recipe import SavedModel

VOCABULARY = 256
"""One token per byte value."""


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT: what is needed to build it before its weights are loaded.

    `width` is the number of features per position and must be a multiple of `heads`. `block` is the longest context in
    bytes. `dropout` is the probability of dropping an activation in training. Raises `ConfigError` for a shape that
    cannot be built.
    """

    layers: int = 4
    heads: int = 4
    width: int = 128
    block: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.width, self.block) < 1:
            raise ConfigError(f"layers, heads, width and block must be at least 1; got {self}")
        if self.width % self.heads:
            raise ConfigError(f"width {self.width} is not a multiple of heads {self.heads}; choose one that is")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout must be in [0, 1); got {self.dropout}")


class Attention(nn.Module):
    """Causal multi-head self-attention over [batch, time, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected


class TransformerLayer(nn.Module):
    """One transformer layer: attention, then an MLP of four times the width, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        hidden = functional.gelu(self.up(self.norm_mlp(x)))
        summed: Tensor = x + self.dropout(self.down(hidden))
        return summed


class GPT(SavedModel):
    """A language model over bytes: int64 [batch, time] in, float logits [batch, time, 256] out.

    The initial weights come from torch's global generator: call `torch.manual_seed` first for the same model twice.
    """

    config_type = GPTConfig
    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.block, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(TransformerLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise()

    def _initialise(self) -> None:
        """Initialise like GPT-2: normal(0.02); projections into the residual stream are scaled by 1/sqrt(number)."""
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                added = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=residual if added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the byte that follows each position; `time` may be at most `config.block`."""
        time = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(time, device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte; `tokens` and `targets` are int64 [batch, time]."""
        return functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, n: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """Continue `prompt` by `n` bytes. The same seed gives the same bytes, independent of the global random state.

        `temperature` 0 always takes the likeliest byte, 1 samples as the model predicts. An empty prompt starts after a
        line break.
        """
        generator = torch.Generator().manual_seed(seed)
        device = self.tokens.weight.device
        text = list(prompt or b"\n")
        was_training = self.training
        self.eval()
        for _ in range(n):
            window = torch.tensor([text[-self.config.block :]], device=device)
            text.append(_sample(self(window)[0, -1], temperature=temperature, generator=generator))
        self.train(was_training)
        return bytes(text[-n:]) if n else b""

def _sample(logits: Tensor, *, temperature: float, generator: torch.Generator) -> int:
    """Draw one byte from logits [256]. The draw is on the CPU, so every device gives the same byte."""
    logits = logits.float().cpu()
    if temperature <= 0.0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator))
