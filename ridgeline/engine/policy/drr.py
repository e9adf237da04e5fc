"""Deficit round robin (Shreedhar and Varghese, 1996): tenants come in turn, each with as much service as a quantum.

A tenant whose quantum is used up is passed over until those of all others that wait are, too. The quantum is half of
the dearest prompt so far, so that each turn has room for some requests, and turns stay within the bound of
`tenants.py`.
"""

from __future__ import annotations

from ridgeline.engine.policy.tenants import Tenants

MOST = 1 << 32  # tenants


class DRR(Tenants):
    def turn(self, tenant: int) -> float:
        """Return the quanta that the tenant has used, and behind the point its place among the tenants."""
        quantum = max(self.dearest / 2, 1e-9)
        return self.spent_T.item(tenant) // quantum + tenant / MOST
