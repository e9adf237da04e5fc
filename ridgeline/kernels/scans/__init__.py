"""Recurrent ops: states of constant size."""
