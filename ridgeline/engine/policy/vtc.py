"""Virtual token counters: the tenant with least service comes first (Sheng et al., "Fairness in Serving Large Language
Models", 2024), counted in milliseconds instead of tokens."""

from __future__ import annotations

from ridgeline.engine.policy.tenants import Tenants


class VTC(Tenants):
    pass
