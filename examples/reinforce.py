"""REINFORCE on a key-value store: workers play episodes of a cart-pole, servers keep the policy.

    rallypoint run --workers 3 --servers 2 --replication 2 examples/reinforce.py --steps 60
    rallypoint run --workers 3 --servers 2 --replication 2 --set sync.type=async examples/reinforce.py --steps 60

Williams, 1992; the cart-pole of Barto, Sutton and Anderson, 1983. Actions follow from (policy, step, contributor):
under rp.Sync() the policy ends with the same bytes whatever is killed. With sync.type=async nobody waits for a slow
actor; each (step, contributor) counts once, and two runs end with different policies.
"""

from __future__ import annotations

import argparse
import hashlib
import math

import torch
from torch.nn.functional import log_softmax

import rallypoint as rp

CONTRIBUTORS, EPISODES, LONGEST = 6, 8, 100
HIDDEN, STATES, ACTIONS = 16, 4, 2
FIRST, LAST = STATES * HIDDEN, HIDDEN * ACTIONS


def log_chances(policy: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The logarithms of the chances of both actions in each of these states (n, 4) -> (n, 2)."""
    hidden = torch.tanh(states @ policy[:FIRST].view(STATES, HIDDEN))
    return log_softmax(hidden @ policy[FIRST:].view(HIDDEN, ACTIONS), dim=-1)


def moved(states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """The states (place, speed, angle, its speed) of these carts 0.02 s after a push to the left (0) or right (1)."""
    _, speed, angle, turning = states.unbind(1)
    force = 20.0 * actions - 10.0
    pull = (force + 0.05 * turning**2 * angle.sin()) / 1.1
    turn = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    push = pull - 0.05 * turn * angle.cos() / 1.1
    change = torch.stack([speed, push, turning, turn], dim=1)
    return states + 0.02 * change


def play(policy: torch.Tensor, seed: int) -> tuple[torch.Tensor, float]:
    """Play some episodes side by side. Returns the policy's gradient, and for how many moves the poles stood."""
    random = torch.Generator().manual_seed(seed)
    states = torch.rand(EPISODES, STATES, generator=random) * 0.1 - 0.05
    stands = torch.ones(EPISODES)
    policy = policy.clone().requires_grad_()
    chosen, stood = list[torch.Tensor](), list[torch.Tensor]()
    for _ in range(LONGEST):
        chances = log_chances(policy, states)
        actions = torch.multinomial(chances.detach().exp(), 1, generator=random)
        chosen.append(chances.gather(1, actions).squeeze(1) * stands)
        states = moved(states, actions.squeeze(1))
        stood.append(stands)
        stands = stands * (states[:, 0].abs() < 2.4) * (states[:, 2].abs() < math.radians(12))
    lasted = torch.stack(stood)
    to_come = lasted.flip(0).cumsum(0).flip(0)  # the moves that each move was followed by
    advantage = (to_come - to_come.sum(1, keepdim=True) / lasted.sum(1, keepdim=True).clamp(min=1)) / LONGEST
    loss = -(torch.stack(chosen) * advantage * lasted).sum() / EPISODES
    (gradient,) = torch.autograd.grad(loss, policy)
    return gradient, float(lasted.sum(0).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="updates of the policy by each contributor (60)")
    steps: int = parser.parse_args().steps
    first = 0.3 * torch.randn(FIRST + LAST, generator=torch.Generator().manual_seed(0))
    with rp.join() as job:
        store = job.store({"policy": first}, contributors=CONTRIBUTORS, steps=steps, optimizer=rp.Adam(lr=0.02))
        for step, contributor in store.due("policy", steps):
            policy = store.pull("policy", step=step)  # under async: the newest
            gradient, _ = play(policy, step * CONTRIBUTORS + contributor)
            store.push("policy", gradient, step=step, contributor=contributor)
        policy = store.pull("policy", step=steps)
        before, after = (sum(play(one, 10**6 + game)[1] for game in range(4)) / 4 for one in (first, policy))
        digest = hashlib.sha256(policy.numpy().tobytes()).hexdigest()[:16]
        print(f"the pole stood for {before:.0f} moves before, {after:.0f} after; policy {digest}", flush=True)


if __name__ == "__main__":
    main()
