"""Two small models that ship, one that sees and one that hears: what they learn from is made here, and they are trained
and measured here."""
