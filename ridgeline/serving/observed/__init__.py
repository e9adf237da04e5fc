"""Observation of a running server: metrics, where requests' time went, traces, stalls, the dashboard."""
