"""Does a replica serve what the learner means? Decided by log-probabilities of a canary prompt.

The scale comes from the probe, an adapter with large random A and B. A replica with the right base, key map,
orientation and scaling reproduces the learner's numbers for it up to rounding; a wrong one is off by about as much as
the probe changes the base. What rounding amounts to on this replica is then what versions are held to.
"""

from collections.abc import Sequence

import numpy as np

ROUNDING = {"float32": 5e-4, "bfloat16": 0.15, "float16": 0.15}
"""Mean |Δ| of log-probabilities, in nats, that two sound implementations never exceed at this dtype.

Measured between vLLM and others on a 135M model: float32 6e-6 on average, at most 7e-5, and 5e-4 after training steps;
bfloat16 0.04 on average over likely text and 0.09 over a canary of random tokens, at most 0.5; float16, which rounds
less, was not measured and has bfloat16's bounds. The margin is for larger
models and adapters: a good policy that is refused stops the run, while a bad one that slips through here has still
passed digest, keys and shapes.
"""

REPRODUCED = {"float32": 0.05, "bfloat16": 0.2, "float16": 0.2}
"""How far a replica may be from the learner's probe, as a share of the probe's own distance from the base.

Rounding alone was measured at 1e-5 (float32; reduced-precision products of an accelerator come to about 0.01) and at
0.04 to 0.12 (bfloat16); a probe with one of the seven modules ignored at 0.43 and more, with one layer of thirty
ignored at 0.24, with the scale doubled above 1.
"""

PEAK = 10.0
"""How far the largest |Δ| of a canary may lie above the bound of the mean: the ratio measured in both dtypes."""

_MARGIN = 3.0
_SEPARATED = 3.0

Logprobs = Sequence[float] | np.ndarray


class NotProved(Exception):
    """The probe does not prove this replica. The message is one sentence with the numbers."""


def calibrate(probe_reference: Logprobs, probe_measured: Logprobs, base_reference: Logprobs, dtype: str) -> float:
    """Accepts or refuses a replica by its probe.

    Accepted if the replica is much nearer to the learner's probe than that is to the base, on average, and both are
    well apart from the base at this dtype.

    Args:
        probe_reference: the learner's log-probabilities of the canary under the probe.
        probe_measured: the replica's.
        base_reference: of the same canary under the base (v0).
        dtype: what the replica computes in.

    Returns:
        The bound for `check`: three times the probe's mean |Δ|, or the rounding of the dtype if that is more.

    Raises:
        NotProved: with the reason.
    """
    rounding = ROUNDING[dtype]
    for name, other in (("replica's", probe_measured), ("base's", base_reference)):
        if (problem := _incomparable(probe_reference, other)) is not None:
            raise NotProved(f"the {name} log-probabilities of the probe's canary {problem}")
    reference, measured, base = (np.asarray(x, np.float64) for x in (probe_reference, probe_measured, base_reference))
    strength = float(np.mean(np.abs(reference - base)))
    effect = float(np.mean(np.abs(measured - base)))
    error = float(np.mean(np.abs(measured - reference)))
    if strength < _SEPARATED * rounding:
        raise NotProved(
            f"the probe proves nothing: it changes the base's log-probabilities by {strength:.3g} on average, "
            f"and {dtype} needs {_SEPARATED * rounding:.3g}"
        )
    if effect < _SEPARATED * rounding:
        raise NotProved(
            f"the replica serves the base under the probe's name: it differs from the base by {effect:.3g} on average, "
            f"the learner's probe by {strength:.3g}"
        )
    if error > REPRODUCED[dtype] * strength:
        raise NotProved(
            f"the replica does not reproduce the probe: it is off by {error:.3g} on average, where the probe is "
            f"{strength:.3g} away from the base, and {dtype} allows {REPRODUCED[dtype]:g} of that"
        )
    return max(rounding, _MARGIN * error)


def check(reference: Logprobs, measured: Logprobs, bound: float) -> str | None:
    """Why the replica's canary does not agree with the learner's, in one sentence; None if it does.

    Args:
        bound: of the mean |Δ|, from `calibrate`; the largest may be `PEAK` times as large.
    """
    if (problem := _incomparable(reference, measured)) is not None:
        return f"the replica's log-probabilities of the canary {problem}"
    difference = np.abs(np.asarray(measured, np.float64) - np.asarray(reference, np.float64))
    mean, peak = float(np.mean(difference)), float(np.max(difference))
    if mean > bound or peak > PEAK * bound:
        return (
            f"the canary's log-probabilities differ from the learner's by {mean:.3g} on average (allowed: {bound:.3g}) "
            f"and by {peak:.3g} at most (allowed: {PEAK * bound:.3g})"
        )
    return None


def _incomparable(reference: Logprobs, other: Logprobs) -> str | None:
    if len(other) != len(reference) or not len(reference):
        return f"are {len(other)}, not {len(reference)}"
    if not np.all(np.isfinite(np.asarray(other, np.float64))):
        return "are not all finite"
    if not np.all(np.isfinite(np.asarray(reference, np.float64))):
        return "have no finite reference"
    return None
