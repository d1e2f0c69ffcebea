"""Optimizers as data: what servers apply, or (local steps) what workers do between two synchronisations."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from rallypoint.core.schedule import Schedule
from rallypoint.core.typed import CountFromOne, CountFromZero, Decay, FromZero, SettingsType, ShareOrZero
from rallypoint.errors import ConfigError


class _ByNameOnly(SettingsType):
    """The type of optimizers' settings: a call with parameters, as of torch's optimizers, is answered by a sentence."""

    def __call__(cls, *arguments: Any, **settings: Any) -> Any:
        if arguments:
            raise ConfigError(
                f"rp.{cls.__name__} takes settings by name, such as rp.{cls.__name__}(lr=1e-3), and no parameters: the "
                "servers own the optimizer, and step the parameters of the model that job.train is given"
            )
        return super().__call__(**settings)


class AdamW(msgspec.Struct, metaclass=_ByNameOnly, frozen=True, tag="adamw", kw_only=True, forbid_unknown_fields=True):
    """torch.optim.AdamW (Loshchilov and Hutter, 2019).

    `fused` is nearly three times as fast on a server's core. The bytes are still the same for any number of workers
    and servers, but differ from plain PyTorch's: torch's fused kernel rounds the tail of a tensor differently, and
    shards end elsewhere than parameters do.
    """

    lr: Schedule | FromZero = 1e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: FromZero = 1e-8
    weight_decay: FromZero = 0.01
    fused: bool = False


class Adam(msgspec.Struct, metaclass=_ByNameOnly, frozen=True, tag="adam", kw_only=True, forbid_unknown_fields=True):
    """torch.optim.Adam (Kingma and Ba, 2015). `fused`: see AdamW."""

    lr: Schedule | FromZero = 1e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: FromZero = 1e-8
    weight_decay: FromZero = 0.0
    fused: bool = False


class SGD(msgspec.Struct, metaclass=_ByNameOnly, frozen=True, tag="sgd", kw_only=True, forbid_unknown_fields=True):
    """torch.optim.SGD, with momentum and Nesterov's variant (Sutskever et al., 2013)."""

    lr: Schedule | FromZero = 1e-2
    momentum: FromZero = 0.0
    nesterov: bool = False
    weight_decay: FromZero = 0.0


class Adagrad(
    msgspec.Struct, metaclass=_ByNameOnly, frozen=True, tag="adagrad", kw_only=True, forbid_unknown_fields=True
):  # fmt: skip
    """torch.optim.Adagrad (Duchi, Hazan and Singer, 2011).

    Each element's rate is `lr` over the root of the sum of its squared gradients so far. `lr_decay` divides the
    schedule's rate by 1 + lr_decay * n after n updates of the shard (skipped steps are not counted).
    """

    lr: Schedule | FromZero = 1e-2
    lr_decay: FromZero = 0.0
    weight_decay: FromZero = 0.0
    initial_accumulator_value: FromZero = 0.0
    eps: FromZero = 1e-10


class NAdam(msgspec.Struct, metaclass=_ByNameOnly, frozen=True, tag="nadam", kw_only=True, forbid_unknown_fields=True):
    """torch.optim.NAdam: Adam with Nesterov momentum (Dozat, 2016)."""

    lr: Schedule | FromZero = 2e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: FromZero = 1e-8
    weight_decay: FromZero = 0.0
    momentum_decay: FromZero = 4e-3
    decoupled_weight_decay: bool = False


class RAdam(msgspec.Struct, metaclass=_ByNameOnly, frozen=True, tag="radam", kw_only=True, forbid_unknown_fields=True):
    """torch.optim.RAdam: Adam with a rectified rate in its first steps (Liu et al., 2020)."""

    lr: Schedule | FromZero = 1e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: FromZero = 1e-8
    weight_decay: FromZero = 0.0
    decoupled_weight_decay: bool = False


class Adamax(
    msgspec.Struct, metaclass=_ByNameOnly, frozen=True, tag="adamax", kw_only=True, forbid_unknown_fields=True
):  # fmt: skip
    """torch.optim.Adamax: Adam with the infinity norm (Kingma and Ba, 2015)."""

    lr: Schedule | FromZero = 2e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: FromZero = 1e-8
    weight_decay: FromZero = 0.0


class Adadelta(
    msgspec.Struct, metaclass=_ByNameOnly, frozen=True, tag="adadelta", kw_only=True, forbid_unknown_fields=True
):  # fmt: skip
    """torch.optim.Adadelta (Zeiler, 2012)."""

    lr: Schedule | FromZero = 1.0
    rho: ShareOrZero = 0.9
    eps: FromZero = 1e-6
    weight_decay: FromZero = 0.0


class RMSprop(
    msgspec.Struct, metaclass=_ByNameOnly, frozen=True, tag="rmsprop", kw_only=True, forbid_unknown_fields=True
):  # fmt: skip
    """torch.optim.RMSprop (Tieleman and Hinton, 2012); `centered` as by Graves (2013)."""

    lr: Schedule | FromZero = 1e-2
    alpha: FromZero = 0.99
    eps: FromZero = 1e-8
    weight_decay: FromZero = 0.0
    momentum: FromZero = 0.0
    centered: bool = False


class ASGD(msgspec.Struct, metaclass=_ByNameOnly, frozen=True, tag="asgd", kw_only=True, forbid_unknown_fields=True):
    """torch.optim.ASGD (Polyak and Juditsky, 1992). Its own average, `ax`, is in exports with the optimizer's state."""

    lr: Schedule | FromZero = 1e-2
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: FromZero = 0.0


class Muon(msgspec.Struct, metaclass=_ByNameOnly, frozen=True, tag="muon", kw_only=True, forbid_unknown_fields=True):
    """torch.optim.Muon (Jordan et al., 2024) for matrices, torch.optim.AdamW for everything else.

    A matrix is a parameter of two dimensions whose name matches none of `adamw` (shell patterns: name embeddings and
    the output layer there). It is one shard, of at most 64 MiB, since it is orthogonalized as a whole. Both optimizers
    have the same rate and decay: with "match_rms_adamw" (Liu et al., 2025) an update of a matrix is as large as
    AdamW's. torch's own default is "original".
    """

    lr: Schedule | FromZero = 1e-3
    weight_decay: FromZero = 0.1
    momentum: Decay = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: FromZero = 1e-7
    ns_steps: Annotated[int, msgspec.Meta(ge=1, le=99)] = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    adamw: tuple[str, ...] = ()
    adamw_betas: tuple[Decay, Decay] = (0.9, 0.999)
    adamw_eps: FromZero = 1e-8

    def of_others(self) -> AdamW:
        """The optimizer of the parameters that are no matrices."""
        return AdamW(lr=self.lr, betas=self.adamw_betas, eps=self.adamw_eps, weight_decay=self.weight_decay)


class Sum(msgspec.Struct, metaclass=_ByNameOnly, frozen=True, tag="sum", kw_only=True, forbid_unknown_fields=True):
    """No optimizer: a shard's next version is the sum of its contributions. For loops of a script's own: see
    `core/worker/rolling.py`. It has no settings; the rate and the decay are there because all others have them.
    """

    lr: Schedule | float = 0.0
    weight_decay: float = 0.0


Optimizer = AdamW | Adam | SGD | Adagrad | NAdam | RAdam | Adamax | Adadelta | RMSprop | ASGD | Muon | Sum


def of_shard(spec: Optimizer, columns: int) -> Optimizer:
    """The optimizer of a shard: `spec`, but AdamW for what is no matrix under Muon. `columns`: see `layout.Shard`."""
    return spec.of_others() if isinstance(spec, Muon) and not columns else spec


# Averages of the weights as data: servers keep one beside the parameters, for evaluation and export.


class EMA(msgspec.Struct, metaclass=SettingsType, frozen=True, tag="ema", forbid_unknown_fields=True):
    """An exponential moving average: average = decay * average + (1 - decay) * parameters, after every update.

    The bytes equal torch's AveragedModel with ``get_ema_multi_avg_fn(decay)``, updated after every step: the
    first update copies the parameters.
    """

    decay: Decay = 0.999


class SWA(msgspec.Struct, metaclass=SettingsType, frozen=True, tag="swa", forbid_unknown_fields=True):
    """The mean of the parameters after updates `start`, `start` + `every`, ... (Izmailov et al., 2018).

    The bytes equal torch's AveragedModel with its defaults on a CPU, updated after these steps.
    """

    start: CountFromZero = 0
    every: CountFromOne = 1


Average = EMA | SWA


def takes(average: Average, version: int) -> bool:
    """Does the average take the parameters of this version? It counts updates: 1 after the first."""
    if isinstance(average, EMA):
        return True
    first = max(1, average.start)
    return version >= first and (version - first) % average.every == 0


# Dynamic loss scaling for fp16: how the scale follows from the steps that were applied and skipped.
#
# The scale of step t is a part of version t, like a buffer of the model: two words beside the buffers, `ENTRY` in the
# layout. So it has a primary and a backup, is in snapshots, and reaches every worker with the version, before the
# backward pass that needs it. The server that holds it tells it to the others with its measure of the step's sums
# (`core/shard/clip.py`).

ENTRY = "rallypoint.loss_scale"  # the layout's name for (scale, steps applied since it has changed)
_LARGEST, _SMALLEST = 2.0**127, 2.0**-126  # fp32 holds these, and all powers of two between them


def is_power_of_two(value: float) -> bool:
    """True for 2, 65536 and 0.5; False for 3, 0 and -2, and for what fp32 does not hold."""
    return _SMALLEST <= value <= _LARGEST and math.frexp(value)[0] == 0.5


def _power(words: str, ge: float | None = None, le: float | None = None) -> msgspec.Meta:
    said = f"that is a power of two, {words}"
    return msgspec.Meta(ge=ge, le=le, description=said, extra={"allows": is_power_of_two})


class LossScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule and the defaults of torch.amp.GradScaler (Micikevicius et al., 2018, "Mixed Precision Training").

    A step whose gradients are not finite is skipped, and the scale is multiplied by `backoff_factor`. After
    `growth_interval` steps in a row that were applied, it is multiplied by `growth_factor`. `init_scale` and the
    factors are powers of two: then scaling rounds nothing.
    """

    init_scale: Annotated[float, _power("from 2^-126 to 2^127")] = 65536.0
    growth_factor: Annotated[float, _power("of at least 1", ge=1)] = 2.0
    backoff_factor: Annotated[float, _power("of at most 1", le=1)] = 0.5
    growth_interval: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 2000  # fp32 counts so far

    def after(self, scale: float, applied: int, *, skipped: bool) -> tuple[float, int]:
        """Return the scale after a step, and the steps applied since it has changed."""
        if skipped:
            return max(_SMALLEST, scale * self.backoff_factor), 0
        if applied + 1 < self.growth_interval:
            return scale, applied + 1
        return min(_LARGEST, scale * self.growth_factor), 0
