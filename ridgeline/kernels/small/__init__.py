"""Ops that are bound by memory."""
