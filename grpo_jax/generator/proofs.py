"""What one server has been proved to serve: by which numbers, how lately, and when it is to be asked once more.

A proof holds for the moment. What is proved is proved again at random times, so that whatever goes wrong later (memory,
an adapter exchanged behind the name, a fault that shows under load) does not go on for the rest of the run.
"""

import random
import time
from dataclasses import dataclass

from grpo_jax.adapters.manifest import Canary, Manifest
from grpo_jax.adapters.proof import ROUNDING, calibrate, check
from grpo_jax.generator.sameness import Make, difference


@dataclass
class _Proof:
    canary: Canary
    at: float  # seconds since the epoch, for people
    due: float  # monotonic seconds


class Proofs:
    """Of one server. Holds numbers only; whoever asks the server tells what it said."""

    def __init__(self, dtype: str, reproof_s: float):
        """
        Args:
            dtype: what the server computes in.
            reproof_s: mean time after which a policy is due again.
        """
        self._dtype, self._reproof_s = dtype, reproof_s
        self._proofs: dict[str, _Proof] = {}
        self._make: Make | None = None
        self._bound = ROUNDING[dtype]
        self.calibrated = False
        """Whether the probe that counts now has been reproduced."""
        self.count = 0
        """Canaries that agreed, in all."""

    def __contains__(self, name: str) -> bool:
        return name in self._proofs

    @property
    def times(self) -> dict[str, float]:
        """When each policy was proved last, in seconds since the epoch."""
        return {name: proof.at for name, proof in self._proofs.items()}

    def uncalibrate(self) -> None:
        """Another probe is to judge from now on; what is proved stays so, by the old bound."""
        self._make, self.calibrated = None, False

    def forget(self) -> None:
        """Nothing is proved any more."""
        self.uncalibrate()
        self._bound = ROUNDING[self._dtype]
        self._proofs.clear()

    def discard(self, name: str) -> None:
        self._proofs.pop(name, None)

    def calibrate(self, manifest: Manifest, make: Make, measured: list[float], base: list[float]) -> None:
        """Accepts the server by its probe, or raises NotProved. Versions are held to the probe's make and rounding."""
        self._bound = calibrate(manifest.canary.logprobs, measured, base, self._dtype)
        self._make, self.calibrated = make, True
        self.count += 1

    def unlike(self, make: Make) -> str | None:
        """In what an adapter is not of the probe's make; None also as long as there is no probe."""
        return None if self._make is None else difference(self._make, make)

    def judge(self, name: str, canary: Canary, measured: list[float]) -> str | None:
        """Why the server does not serve `name`, or None: then it is proved.

        Before any calibration the bound is what rounding amounts to at most in this dtype.
        """
        problem = check(canary.logprobs, measured, self._bound)
        if problem is None:
            self.count += 1
            self._proofs[name] = _Proof(canary, time.time(), self._next_due())
        return problem

    @property
    def is_due(self) -> bool:
        return any(proof.due <= time.monotonic() for proof in self._proofs.values())

    def due(self) -> tuple[str, Canary] | None:
        """A policy that is to be proved once more now. It is due again after another random time, whatever happens."""
        name = min(self._proofs, key=lambda name: self._proofs[name].due, default=None)
        if name is None or self._proofs[name].due > time.monotonic():
            return None
        self._proofs[name].due = self._next_due()
        return name, self._proofs[name].canary

    def _next_due(self) -> float:
        return time.monotonic() + random.expovariate(1 / self._reproof_s)
