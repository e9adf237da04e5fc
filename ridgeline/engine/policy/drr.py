"""Deficit round robin (Shreedhar and Varghese, 1996): tenants come in turn, each with as much service as a quantum.

A tenant whose quantum is used up is passed over until those of all others that wait are, too. The quantum is the
largest power of two of milliseconds up to half of the dearest prompt so far: each turn has room for some requests, and
turns stay within the bound of `tenants.py`. With a larger quantum turns have lower numbers, so those that wait are
sorted anew; powers of two make that rare.
"""

from __future__ import annotations

from math import log2

from ridgeline.engine.policy.base import Terms
from ridgeline.engine.policy.tenants import Tenants
from ridgeline.engine.sequence import Sequence

MOST = 1 << 32  # tenants


class DRR(Tenants):
    def __init__(self, terms: Terms | None = None) -> None:
        super().__init__(terms)
        self._quantum = 1e-9

    def come(self, seq: Sequence) -> None:
        super().come(seq)
        if self.dearest >= 4 * self._quantum:
            self._quantum = 2.0 ** (log2(self.dearest) // 1 - 1)
            self.fell = True

    def turn(self, tenant: int) -> float:
        """Return the quanta that the tenant has used, and behind the point its place among the tenants."""
        return self.spent_T.item(tenant) // self._quantum + tenant / MOST
